"""What `spbench list cluster NAME` shows: what is known of a cluster by kind of work, and what is not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.clusters.kinds_of_work import GAP, STANDS_IN, kinds_of_work

COLUMNS = ("work", "figure", "source")


def cluster_output(name: str, figure: Path | None = None) -> Output:
    """The packaged cluster of that name, or that of a file; UserError if there is none.

    Args:
        figure: a file beside which its rates are drawn, as NAME.png, .svg and .pdf; None: they are not.
    """
    cluster = load_cluster(name)
    files = [] if figure is None else _drawn(cluster, figure)
    kinds = kinds_of_work(cluster)
    lines: list[dict[str, Any]] = [dict(zip(COLUMNS, kind, strict=True)) for kind in kinds]
    gaps = [kind.work for kind in kinds if not kind.known]
    marked, substitutes = [], defaultdict[str, dict[str, None]](dict)
    for kind in kinds:
        reached, stands_in, substitute = kind.figure.partition(f" ({STANDS_IN}: ")
        if stands_in:
            substitutes[substitute.removesuffix(")")][kind.work] = None
        reached += " *" if stands_in else ""
        marked.append(dict(zip(COLUMNS, kind._replace(figure=reached), strict=True)))
    notes = [f"without a figure: {'; '.join(gaps)}"] if gaps else []
    notes += [f"* {STANDS_IN}, but {whose}: {'; '.join(of)}" for whose, of in substitutes.items()]
    usable = cluster.usable_memory_bytes
    memory = "no limit of memory" if usable is None else f"{usable / 2**30:.1f} GiB for tensors"
    node = f"{cluster.devices_per_node} a node, network cards: {cluster.network.nics_per_node}"
    return Output(
        [
            f"{cluster.name}: {cluster.about}",
            f"{cluster.device.name}, {memory}; {node}",
            Table(
                "", marked, COLUMNS, ("figure",), {i: GAP for i, kind in enumerate(kinds) if not kind.known}
            ),
        ],
        {"cluster": cluster.model_dump(mode="json"), "kinds_of_work": lines, "gaps": gaps},
        lines,
        COLUMNS,
        notes=notes,
        files=files,
    )


def _drawn(cluster: Cluster, figure: Path) -> list[Path]:
    """The files of the figure of a cluster's rates; UserError if it has none, or they cannot be written."""
    from spbench.bench.measure.simulator.rate_curves import attention_curves, link_curves, product_curves
    from spbench.plots.rates import draw_cluster_rates

    of_kinds = {"size": product_curves, "length": attention_curves, "message": link_curves}
    curves = [asdict(curve) | {"along": along} for along, of in of_kinds.items() for curve in of(cluster)]
    if not curves:
        raise UserError(f"{cluster.name} has no rate that could be drawn; give some in its file")
    try:
        return draw_cluster_rates(curves, f"What {cluster.name} reaches", figure)
    except OSError as error:
        raise UserError(f"cannot write {figure}: {error.strerror}") from error
