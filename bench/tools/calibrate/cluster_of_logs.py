"""A cluster's file from logs of benchmarks and profilers, on top of a packaged cluster or alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.measure.clusters.rates import AttentionKernel
from spbench.bench.tools.calibrate.collectives_of_logs import put_collectives
from spbench.bench.tools.calibrate.log_findings import Findings
from spbench.bench.tools.calibrate.plausible import ROUNDING, check_plausible, one_card
from spbench.bench.tools.calibrate.rate_fits import (
    LARGE_PASS_BYTES,
    attention_rates,
    launch_gap,
    memory_rate,
    product_rates,
)
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


#: a model's "flash" is the first of these that was measured, where no other cluster is extended that says
_NEWEST_FIRST: tuple[AttentionKernel, ...] = (
    *("flash_attention_4", "flash_attention_3", "flash_attention_2", "flash_attention_1"),
    *("cudnn", "triton"),
)


def cluster_of_logs(found: Mapping[str, Findings], base: Cluster | None) -> LogCluster:
    """The cluster that logs, by the names of their files, make.

    Args:
        base: the packaged cluster from which all else is taken; None: all else is unknown.

    Raises:
        UserError: nothing in the logs is of use, or they cannot be (:func:`check_plausible`).
    """
    check_plausible(found, base)
    card = one_card(found)
    about = f"{base.name if base else card or 'A card'}, with what logs say: {', '.join(found)}"
    start = {"extends": base.name, "about": about} if base else {"about": about, **_nothing_known(card)}
    made = LogCluster(start, remarks=[remark for each in found.values() for remark in each.remarks])
    _put_products(made, found, base)
    _put_attention(made, found, base)
    _put_memory(made, found, base)
    if base is None:
        _put_memory_size(made, found)
    _put_launches(made, found, base)
    put_collectives(made, found, base)
    if not made.fitted:
        raise UserError("; ".join(["the logs give no figure of a cluster", *made.remarks]))
    if base and card and card != base.device.name:
        made.remarks.append(f"the logs are of {card}, as which {base.name}'s {base.device.name} is taken")
    return made


def _nothing_known(card: str) -> dict[str, Any]:
    device = ("memory_total_bytes", "memory_context_bytes", "memory_bandwidth_bytes_per_s")
    link = ("latency_s", "bandwidth_bytes_per_s")
    return {
        "device": {"name": card or "not known", **{name: unknown() for name in device}},
        "network": {name: unknown() for name in link},
    }


def _put_products(made: LogCluster, found: Mapping[str, Findings], base: Cluster | None) -> None:
    peaks = {str(name): each.value for name, each in base.device.peak_flops_per_s.items()} if base else {}
    for precision, rate in product_rates(found).items():
        where, peak = f"device.products.{precision}", peaks.get(precision)
        if base and peak:
            share = made.figure(f"{where}.share", rate.limit / peak, rate.how, rate.source)
        else:
            peak_now = made.figure(f"device.peak_flops_per_s.{precision}", rate.limit, rate.how, rate.source)
            made.put({"device": {"peak_flops_per_s": {precision: peak_now}}})
            share = made.figure(f"{where}.share", 1.0, "the peak is what products reach", rate.source)
        operands: dict[str, Any] = {"value": None, "source": "one share for all shapes"}
        if rate.other is not None:
            operands = made.figure(f"{where}.bandwidth_bytes_per_s", rate.other, rate.how, rate.source)
        products = {precision: {"share": share, "bandwidth_bytes_per_s": operands}}
        made.put({"device": {"products": products}, **without_scalar(base, "compute_efficiency", precision)})


def _put_attention(made: LogCluster, found: Mapping[str, Findings], base: Cluster | None) -> None:
    kernels: dict[str, list[dict[str, Any]]] = {}
    for (kernel, head_size, mask, direction), rate in attention_rates(found).items():
        where = f"device.attention.{kernel}, head {head_size}, {mask}, {direction or 'both'}"
        entry = {"head_size": head_size, "mask": mask, **({"direction": direction} if direction else {})}
        entry["limit_flops_per_s"] = made.figure(where, rate.limit, rate.how, rate.source)
        if rate.other is not None:
            entry["half_length"] = made.figure(f"{where}, half length", rate.other, rate.how, rate.source)
        kernels.setdefault(kernel, []).append(entry)
    if not kernels:
        return
    of_base = base.device.attention if base else None
    default = of_base.default if of_base else next(name for name in _NEWEST_FIRST if name in kernels)
    made.put({"device": {"attention": {"default": default, "kernels": kernels}}})


def _put_memory(made: LogCluster, found: Mapping[str, Findings], base: Cluster | None) -> None:
    rate = memory_rate(found)
    if rate is None:
        if any(each.passes for each in found.values()):
            least = f"{LARGE_PASS_BYTES / 2**20:.0f} MiB"
            made.remarks.append(f"memory: no element-wise kernel moves {least}; caches may hold what is less")
        return
    datasheet = base.device.memory_bandwidth_bytes_per_s.value if base else None
    if datasheet is None:
        known = made.figure("device.memory_bandwidth_bytes_per_s", rate.limit, rate.how, rate.source)
        made.put({"device": {"memory_bandwidth_bytes_per_s": known}})
    elif rate.limit > ROUNDING * datasheet:
        made.remarks.append(
            f"memory: {rate.source} reaches {rate.limit / 1e12:.3g} TB/s, above the datasheet's "
            f"{datasheet / 1e12:.3g}: caches, or another card; left out"
        )
        return
    else:
        share = made.figure("device.memory_efficiency", rate.limit / datasheet, rate.how, rate.source)
        made.put({"device": {"memory_efficiency": share}})
    made.put(without_scalar(base, "memory_efficiency"))


def _put_memory_size(made: LogCluster, found: Mapping[str, Findings]) -> None:
    for path, each in found.items():
        if each.memory_total_bytes:
            size = {"value": each.memory_total_bytes, "source": f"{path} ({each.about})"}
            made.put({"device": {"memory_total_bytes": size}})


def _put_launches(made: LogCluster, found: Mapping[str, Findings], base: Cluster | None) -> None:
    gap = launch_gap(found)
    if gap is None:
        return
    made.put({"device": {"launch_overhead_s": made.figure("device.launch_overhead_s", *gap)}})
    if base and base.device.kernel_floor_s.value:
        made.put(
            {"device": {"kernel_floor_s": {"value": None, "source": "launch_overhead_s is in its place"}}}
        )
