"""A cluster's file while figures of logs are put into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.yaml_files import merge

#: digits of a figure
_DIGITS = 4
_NOWHERE = "in none of the logs"
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: what logs can say, and where it stands in the file
_WANTED: dict[str, str | tuple[str, ...]] = {
    **{
        f"matrix products, {precision}": f"device.products.{precision}"
        for precision in ("bf16", "fp16", "fp32")
    },
    "attention": "device.attention",
    "memory": ("device.memory_efficiency", "device.memory_bandwidth_bytes_per_s"),
    "gaps between kernels": "device.launch_overhead_s",
    "send, within a node": "node_link: bandwidth_bytes_per_s",
    **{f"{kind}, within a node": f"node_link.collectives.{kind}" for kind in _COLLECTIVES},
    "send, between nodes": "network: bandwidth_bytes_per_s",
    # an all-to-all between nodes is timed by its sends
    **{f"{kind}, between nodes": f"network.collectives.{kind}" for kind in _COLLECTIVES[:-1]},
}


@dataclass
class LogCluster:
    """What a cluster's file is to say.

    Attributes:
        content: of the file.
        fitted: a line for each figure of a log: where it stands, its value, how it was found, its source.
        remarks: what was left out and why.
    """

    content: dict[str, Any]
    fitted: list[dict[str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """What logs can say and these do not."""
        found = [line["figure"] for line in self.fitted]
        return [what for what, where in _WANTED.items() if not any(f.startswith(where) for f in found)]

    def put(self, part: Mapping[str, Any]) -> None:
        """Add a part of the file."""
        self.content = merge(self.content, part)

    def figure(self, where: str, value: float, how: str, source: str) -> dict[str, Any]:
        """A figure of the file, of which a line is kept."""
        rounded = float(f"{value:.{_DIGITS}g}")
        self.fitted.append({"figure": where, "value": f"{rounded:g}", "how": how, "source": source})
        return {"value": rounded, "source": source, "note": how}


def unknown() -> dict[str, Any]:
    """A figure that no log has."""
    return {"value": None, "source": _NOWHERE}


def without_scalar(base: Cluster | None, scalar: str, precision: str | None = None) -> dict[str, Any]:
    """The part that takes back what the base's calibration makes of a rate; {} if it makes nothing of it."""
    back = {
        str(name): {scalar: 1.0, **({} if len(each.scalars) > 1 else {"fitted_on": []})}
        for name, each in (base.calibration.items() if base else ())
        if scalar in each.scalars and precision in (None, name)
    }
    return {"calibration": back} if back else {}


def heading(made: LogCluster) -> Iterator[str]:
    """The lines of the comment at the top of the file: each figure, and how far the fit is from the logs."""
    for line in made.fitted:
        yield f"{line['figure']} = {line['value']}: {line['how']}"
    if made.missing:
        yield f"in none of the logs: {', '.join(made.missing)}"
