"""What `spbench list cluster NAME` shows: what is known of a cluster by kind of work, and what is not."""

from __future__ import annotations

from typing import Any

from spbench.bench.clusters.cluster import load_cluster
from spbench.bench.clusters.kinds_of_work import kinds_of_work
from spbench.bench.commands.output import Output, Table

COLUMNS = ("work", "figure", "source")


def cluster_output(name: str) -> Output:
    """The packaged cluster of that name, or that of a file; UserError if there is none."""
    cluster = load_cluster(name)
    kinds = kinds_of_work(cluster)
    lines: list[dict[str, Any]] = [dict(zip(COLUMNS, kind, strict=True)) for kind in kinds]
    gaps = [kind.work for kind in kinds if not kind.known]
    usable = cluster.usable_memory_bytes
    memory = "no limit of memory" if usable is None else f"{usable / 2**30:.1f} GiB for tensors"
    node = f"{cluster.devices_per_node} a node, network cards: {cluster.network.nics_per_node}"
    return Output(
        [f"{cluster.name}: {cluster.about}", f"{cluster.device.name}, {memory}; {node}", Table("", lines)],
        {"cluster": cluster.model_dump(mode="json"), "kinds_of_work": lines, "gaps": gaps},
        lines,
        COLUMNS,
        notes=[f"without a figure: {'; '.join(gaps)}"] if gaps else [],
    )
