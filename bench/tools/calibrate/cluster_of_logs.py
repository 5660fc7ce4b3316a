"""A cluster's file from logs of benchmarks and profilers, which may extend a packaged cluster."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.measure import Cluster, Link
from spbench.bench.tools.calibrate import rate_fits
from spbench.bench.tools.calibrate.log_findings import ROUNDING, Findings, check_plausible, one_card
from spbench.bench.yaml_files import merge, read_yaml

#: the digits to which a figure is rounded
_DIGITS = 4
_NOWHERE = "in none of the logs"
_TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))


@dataclass
class LogCluster:
    """The content of a cluster's file, while figures of logs are added.

    Attributes:
        content: the content of the file.
        fitted: for each figure of a log, a line with its key, its value, words on its fit, and its source.
        remarks: figures that were left out, with the reason, one line each.
    """

    content: dict[str, Any]
    fitted: list[dict[str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """The kinds of figures that logs can have but these logs lack."""
        figures = [line["figure"] for line in self.fitted]
        wanted = {what: tuple(where) for what, where in _TABLES["wanted"].items()}
        return [what for what, where in wanted.items() if not any(f.startswith(where) for f in figures)]

    def put(self, part: Mapping[str, Any]) -> None:
        """Merge a part into the file's content."""
        self.content = merge(self.content, part)

    def figure(self, where: str, value: float, how: str, source: str) -> dict[str, Any]:
        """A figure as the file has it; adds a line on its value, fit and source to ``fitted``."""
        rounded = float(f"{value:.{_DIGITS}g}")
        self.fitted.append({"figure": where, "value": f"{rounded:g}", "how": how, "source": source})
        return {"value": rounded, "source": source, "note": how}


def unknown() -> dict[str, Any]:
    """The null that the file has for a figure of no log, with a source that says so."""
    return {"value": None, "source": _NOWHERE}


def without_scalar(base: Cluster | None, scalar: str, precision: str | None = None) -> dict[str, Any]:
    """The part of a file that sets a scalar of the base's calibration to 1; {} if the base has none."""
    back = {
        str(name): {scalar: 1.0, **({} if len(each.scalars) > 1 else {"fitted_on": []})}
        for name, each in (base.calibration.items() if base else ())
        if scalar in each.scalars and precision in (None, name)
    }
    return {"calibration": back} if back else {}


def heading(cluster: LogCluster) -> Iterator[str]:
    """The lines of the comment at the top of the file: each figure, and how far the fit is from the logs."""
    for line in cluster.fitted:
        yield f"{line['figure']} = {line['value']}: {line['how']}"
    if cluster.missing:
        yield f"in none of the logs: {', '.join(cluster.missing)}"


SEND = "send"


def put_collectives(cluster: LogCluster, findings: Mapping[str, Findings], base: Cluster | None) -> None:
    """Put the rates of collectives into the file.

    A rate measured on several nodes is divided among the network cards of a node. The latency of the part
    within a node is subtracted, because a group's time is the sum of both parts.
    """
    rates = rate_fits.collective_rates(findings)
    if not rates:
        return
    most = max(ranks // nodes for _, nodes, ranks in rates)
    if most > (base.devices_per_node if base else 0):
        cluster.put({"devices_per_node": most})
    if base is None:
        cluster.put({"network": {"nics_per_node": most}})
        cluster.remarks.append(
            "network.nics_per_node: one card a device is taken, since no log says how many"
        )
    within: dict[str, dict[int, rate_fits.Rate]] = {}
    between: dict[str, dict[int, tuple[int, rate_fits.Rate]]] = {}
    for (kind, nodes, ranks), rate in rates.items():  # of several worlds on as many nodes the largest remains
        if nodes == 1:
            within.setdefault(kind, {})[ranks] = rate
        else:
            between.setdefault(kind, {})[nodes] = ranks // nodes, rate
    if within and not (base and base.node_link):
        cluster.put({"node_link": {"latency_s": unknown(), "bandwidth_bytes_per_s": unknown()}})
    for kind, by_ranks in within.items():
        _put_rates(cluster, "node_link", kind, by_ranks)
    if SEND in between:
        _put_rates(cluster, "network", SEND, {nodes: rate for nodes, (_, rate) in between.pop(SEND).items()})
    of_base = base.node_link.model_dump(mode="json") if base and base.node_link else {}
    # the link within a node, with the figures of the logs
    link = merge(of_base, cluster.content.get("node_link", {}))
    inside = Link.model_validate(link) if link else None
    cards: int = base.network.nics_per_node if base else cluster.content["network"]["nics_per_node"]
    for kind, by_nodes in between.items():
        parts = {}
        for nodes, (on_a_node, rate) in by_nodes.items():
            share, latency = 1 / min(cards, on_a_node), _latency(inside, kind, on_a_node)
            if kind == "all_to_all":  # each device sends its own pieces, of which some stay within the node
                share, latency = share * on_a_node**2 * (nodes - 1) / (nodes * on_a_node - 1), 0.0
            # of one network card, without the latency within the node
            other = None if rate.other is None else max(0.0, rate.other - latency)
            how = f"{rate.how}; a card's share, {share:.3g}" if share != 1 else rate.how
            parts[nodes] = rate_fits.Rate(rate.best * share, rate.limit * share, other, how, rate.source)
        _put_rates(cluster, "network", kind, parts)
    if any(".collectives." in line["figure"] for line in cluster.fitted):
        cluster.put({"collective_model": "measured"})
    cluster.put(without_scalar(base, "link_efficiency"))


def _put_rates(cluster: LogCluster, link: str, kind: str, by_size: Mapping[int, rate_fits.Rate]) -> None:
    """Put a collective's rates by the number of ranks in a node, or of nodes, into the file; for a send only
    the rate of the largest number."""
    if kind == SEND:
        cluster.put({link: _figures(cluster, link, by_size[max(by_size)])})
        return
    word = "nodes" if link == "network" else "ranks"
    entries = [
        {"ranks": size, **_figures(cluster, f"{link}.collectives.{kind}, {size} {word}", by_size[size])}
        for size in sorted(by_size)
    ]
    if any("latency_s" not in entry for entry in entries):
        entries = [{"latency_s": {"value": None, "source": "too few sizes"}, **entry} for entry in entries]
    cluster.put({link: {"collectives": {kind: entries}}})


def _figures(cluster: LogCluster, where: str, rate: rate_fits.Rate) -> dict[str, Any]:
    latency = {}
    if rate.other is not None:
        latency["latency_s"] = cluster.figure(f"{where}: latency_s", rate.other, rate.how, rate.source)
    bandwidth = cluster.figure(f"{where}: bandwidth_bytes_per_s", rate.limit, rate.how, rate.source)
    return {**latency, "bandwidth_bytes_per_s": bandwidth}


def _latency(link: Link | None, kind: str, ranks: int) -> float:
    """The seconds of a collective's latency within a node, which a latency between nodes must not include."""
    if link is None or ranks == 1:
        return 0.0
    rate = link.rate_of(kind, ranks)
    return (link.latency_s.value or 0.0) if rate is None else rate.latency(ranks)


def cluster_of_logs(findings: Mapping[str, Findings], base: Cluster | None) -> LogCluster:
    """The cluster with the figures of logs; ``findings`` are the logs' figures by the names of their files.

    Args:
        base: the packaged cluster from which all other figures come; None: other figures are unknown.

    Raises:
        UserError: the logs have no figure of a cluster, or :func:`check_plausible` refuses the logs.
    """
    check_plausible(findings, base)
    card = one_card(findings)
    about = f"{base.name if base else card or 'A card'}, with what logs say: {', '.join(findings)}"
    start = {"extends": base.name, "about": about} if base else {"about": about, **_nothing_known(card)}
    cluster = LogCluster(start, remarks=[remark for each in findings.values() for remark in each.remarks])
    _put_matmuls(cluster, findings, base)
    _put_attention(cluster, findings, base)
    _put_memory(cluster, findings, base)
    for path, each in findings.items() if base is None else ():
        if each.memory_total_bytes:
            size = {"value": each.memory_total_bytes, "source": f"{path} ({each.about})"}
            cluster.put({"device": {"memory_total_bytes": size}})
    _put_launches(cluster, findings, base)
    put_collectives(cluster, findings, base)
    if not cluster.fitted:
        raise UserError("; ".join(["the logs give no figure of a cluster", *cluster.remarks]))
    if base and card and card != base.device.name:
        cluster.remarks.append(
            f"the logs come from {card}, as which {base.name}'s {base.device.name} is taken"
        )
    return cluster


def _nothing_known(card: str) -> dict[str, Any]:
    device = ("memory_total_bytes", "memory_context_bytes", "memory_bandwidth_bytes_per_s")
    link = ("latency_s", "bandwidth_bytes_per_s")
    return {
        "device": {"name": card or "not known", **{name: unknown() for name in device}},
        "network": {name: unknown() for name in link},
    }


def _put_matmuls(cluster: LogCluster, findings: Mapping[str, Findings], base: Cluster | None) -> None:
    peaks = {str(name): each.value for name, each in base.device.peak_flops_per_s.items()} if base else {}
    for precision, rate in rate_fits.product_rates(findings).items():
        where, share, how = f"device.matmul.{precision}", 1.0, "the peak is what matmuls reach"
        if peak := peaks.get(precision):
            share, how = rate.limit / peak, rate.how
        else:
            of_peak = f"device.peak_flops_per_s.{precision}", rate.limit, rate.how, rate.source
            cluster.put({"device": {"peak_flops_per_s": {precision: cluster.figure(*of_peak)}}})
        shared = cluster.figure(f"{where}.share", share, how, rate.source)
        operands: dict[str, Any] = {"value": None, "source": "one share for all shapes"}
        if rate.other is not None:
            operands = cluster.figure(f"{where}.bandwidth_bytes_per_s", rate.other, rate.how, rate.source)
        matmuls = {precision: {"share": shared, "bandwidth_bytes_per_s": operands}}
        cluster.put({"device": {"matmul": matmuls}, **without_scalar(base, "compute_efficiency", precision)})


def _put_attention(cluster: LogCluster, findings: Mapping[str, Findings], base: Cluster | None) -> None:
    kernels: dict[str, list[dict[str, Any]]] = {}
    for (kernel, head_size, mask, direction), rate in rate_fits.attention_rates(findings).items():
        where = f"device.attention.{kernel}, head {head_size}, {mask}, {direction or 'both'}"
        entry = {"head_size": head_size, "mask": mask, **({"direction": direction} if direction else {})}
        entry["limit_flops_per_s"] = cluster.figure(where, rate.limit, rate.how, rate.source)
        if rate.other is not None:
            entry["half_length"] = cluster.figure(f"{where}, half length", rate.other, rate.how, rate.source)
        kernels.setdefault(kernel, []).append(entry)
    if not kernels:
        return
    of_base = base.device.attention if base else None
    default = (
        of_base.default if of_base else next(name for name in _TABLES["newest_first"] if name in kernels)
    )
    cluster.put({"device": {"attention": {"default": default, "kernels": kernels}}})


def _put_memory(cluster: LogCluster, findings: Mapping[str, Findings], base: Cluster | None) -> None:
    rate = rate_fits.memory_rate(findings)
    if rate is None:
        if any(each.passes for each in findings.values()):
            least = f"{rate_fits.LARGE_PASS_BYTES / 2**20:.0f} MiB"
            cluster.remarks.append(
                f"memory: no element-wise kernel moves {least}; caches may hold what is less"
            )
        return
    datasheet = base.device.memory_bandwidth_bytes_per_s.value if base else None
    if datasheet is None:
        is_put = cluster.figure("device.memory_bandwidth_bytes_per_s", rate.limit, rate.how, rate.source)
        cluster.put({"device": {"memory_bandwidth_bytes_per_s": is_put}})
    elif rate.limit > ROUNDING * datasheet:
        cluster.remarks.append(
            f"memory: {rate.source} reaches {rate.limit / 1e12:.3g} TB/s, above the datasheet's "
            f"{datasheet / 1e12:.3g}: caches, or another card; left out"
        )
        return
    else:
        share = cluster.figure("device.memory_efficiency", rate.limit / datasheet, rate.how, rate.source)
        cluster.put({"device": {"memory_efficiency": share}})
    cluster.put(without_scalar(base, "memory_efficiency"))


def _put_launches(cluster: LogCluster, findings: Mapping[str, Findings], base: Cluster | None) -> None:
    gap = rate_fits.launch_gap(findings)
    if gap is None:
        return
    cluster.put({"device": {"launch_overhead_s": cluster.figure("device.launch_overhead_s", *gap)}})
    if base and base.device.kernel_floor_s.value:
        cluster.put(
            {"device": {"kernel_floor_s": {"value": None, "source": "launch_overhead_s is in its place"}}}
        )
