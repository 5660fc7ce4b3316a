"""What is written of a measured machine: its cluster file, and a row for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.tools.calibrate.rate_points import RatePoint
from spbench.bench.yaml_text import Dumper, dump


class _Dumper(Dumper):
    """Writes lists of numbers, and of such lists, in one line."""

    def represent_numbers(self, items: list[Any]) -> yaml.Node:
        flow = not any(isinstance(item, Mapping | str) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_Dumper.add_representer(list, _Dumper.represent_numbers)


def cluster_yaml(cluster: Cluster, heading: str) -> str:
    """The text of a cluster's file, under a comment; :func:`load_cluster` gives the same cluster, by the
    file's name. Each measured rate is a line."""
    plain = cluster.model_dump(mode="json", exclude_unset=True, exclude={"name", "measured"})
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    text = comment + dump(plain, dumper=_Dumper, width=110)
    rates = [rate.model_dump(mode="json", exclude_none=True) for rate in cluster.measured]
    lines = [dump(rate, flow=True, width=1000).strip() for rate in rates]
    return "\n".join([text + "\nmeasured:", *(f"  - {line}" for line in lines)]) + "\n"


def sample_rows(points: Sequence[RatePoint]) -> list[dict[str, Any]]:
    """A row for each sample of each point, for a CSV file."""
    rows = []
    for point in points:
        about = {key: value for key, value in asdict(point).items() if key != "samples_s"}
        rows += [{**about, "sample": i, "seconds": s} for i, s in enumerate(point.samples_s)]
    return rows
