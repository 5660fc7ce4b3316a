"""The rates of a cluster as text, by kind of work (matmuls, attention, ...), or what a simulation assumes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from spbench.bench import measure
from spbench.bench.units import shown_time
from spbench.bench.yaml_files import read_yaml

#: the beginning of the text for a rate that the cluster's file does not have
GAP = "not known"
#: the words before the name of another card or cluster whose rate the file uses
STANDS_IN = "not its own"


class KindOfWork(NamedTuple):
    """A kind of work on a cluster.

    Attributes:
        work: the kind of work, such as "matmuls, bf16".
        figure: the rate or time as text, or "not known: " and what a simulation assumes instead.
        source: the source of the rate; "" if there is none.
    """

    work: str
    figure: str
    source: str = ""

    @property
    def known(self) -> bool:
        """Whether the cluster's file has a rate or time for this kind of work."""
        return not self.figure.startswith(GAP)


def kinds_of_work(cluster: measure.Cluster) -> list[KindOfWork]:
    """All kinds of work with their rates in the cluster's file, also kinds without a rate there."""
    of_device = *_matmuls(cluster), *_attention(cluster), *_kernels(cluster)
    return [*of_device, *_host(cluster), *_host_memory(cluster), *_links(cluster)]


def without_own_rates(cluster: measure.Cluster) -> list[str]:
    """The kinds of work, a word or two each, for which a cluster has no rate of its own, so that simulated
    times use the datasheet or another cluster's rates."""
    device, host, node = cluster.device, cluster.host, cluster.node_link
    rates = {cluster.rates_of(precision) for precision in device.peak_flops_per_s}
    if not rates - {"datasheet"}:
        return ["all, by the datasheet alone"] if rates else []
    lacking = {
        "matmuls": any(rate.share.substitute for rate in (device.matmul or {}).values()),
        "attention": device.attention is None and device.attention_efficiency.value is None,
        "memory": device.memory_efficiency.value is None or bool(device.memory_efficiency.substitute),
        "host": host is None or bool(host.scale.substitute),
        "intra-node links": node is not None and _lacks(node),
        "network": _lacks(cluster.network),
    }
    works = [work for work, lacks in lacking.items() if lacks]
    kernels = {} if device.attention is None else device.attention.kernels
    return works + [
        kernel for kernel, of in kernels.items() if all(r.limit_flops_per_s.substitute for r in of)
    ]


def _lacks(link: measure.Link) -> bool:
    if link.table.value is not None:
        return bool(link.table.substitute)
    rates = [
        link.bandwidth_bytes_per_s,
        *(r.bandwidth_bytes_per_s for of in link.collectives.values() for r in of),
    ]
    return any(rate.substitute for rate in rates)


def _of(
    work: str,
    figure: measure.Sourced[Any],
    text: str | Callable[[float], str],
    without: str,
    per: float = 1e9,
) -> KindOfWork:
    """The kind of work of one rate: ``text`` formats its value (``{gb}``: the value divided by ``per``), and
    ``without`` says what a simulation assumes if there is no value."""
    if figure.value is None:
        return KindOfWork(work, f"{GAP}: {without}")
    words = text(figure.value) if callable(text) else text.format(figure.value, gb=figure.value / per)
    return KindOfWork(work, words + _substitute(figure), _source(figure))


def _substitute(figure: measure.Sourced[Any]) -> str:
    """The text that names the card or cluster whose value is used instead; "" for a value of its own."""
    return f" ({STANDS_IN}: {figure.substitute})" if figure.substitute else ""


def _source(figure: measure.Sourced[Any]) -> str:
    return ": ".join(filter(None, (figure.source, figure.note)))


def _table(work: str, table: measure.Sourced[str], words: str) -> Iterator[KindOfWork]:
    """The kind of work of a table of measured calls; none if the cluster has no table."""
    if table.value is not None:
        yield KindOfWork(
            work, f"{measure.table_in_words(table.value)}{words}{_substitute(table)}", _source(table)
        )


def _matmuls(cluster: measure.Cluster) -> Iterator[KindOfWork]:
    device = cluster.device
    for precision in get_args(measure.Precision):
        peak, own = device.peak_flops_per_s.get(precision), (device.matmul or {}).get(precision)
        if peak is None or peak.value is None:
            continue
        work, of_peak = f"matmuls, {precision}", f"{{:.3g}} of {peak.value / 1e12:.4g} TFLOP/s"
        if own is not None:
            words = f"; beyond it the figures below{_kept(own.sustained)}"
            yield from _table(work, own.table, words)
            for nbytes, part in own.unaligned.items():
                yield _of(
                    f"{work}, rows aligned to {nbytes} bytes", part, "{:.3g} of that", "as aligned ones"
                )
        share = device.compute_efficiency if own is None else own.share
        if own is not None and own.bandwidth_bytes_per_s.value is not None:
            of_peak += f", and {own.bandwidth_bytes_per_s.value / 1e9:.4g} GB/s of operands"
        fitted = cluster.calibration_of(precision)
        if share.value is None and fitted.compute_efficiency != 1:
            text = of_peak.format(fitted.compute_efficiency)
            where = f"{len(fitted.fitted_on)} cells" if fitted.fitted_on else "another card"
            yield KindOfWork(work, text, f"calibration.{precision}, fitted on {where}")
            continue
        yield _of(work, share, of_peak, "they count as at the peak")
    for precision, rate in device.grouped_matmul.items():
        words = (
            f"{{:.3g}} of the peak, and {(rate.bandwidth_bytes_per_s.value or 0) / 1e9:.4g} GB/s of operands"
        ) + _kept(rate.sustained)
        yield _of(f"grouped matmuls, {precision}", rate.share, words, "they count as other matmuls")


def _attention(cluster: measure.Cluster) -> Iterator[KindOfWork]:
    device, rates = cluster.device, cluster.device.attention
    for kernel, of_kernel in rates.kernels.items() if rates is not None else ():
        default = ", the default" if rates is not None and kernel == rates.default else ""
        for rate in of_kernel:
            limit = rate.limit_flops_per_s
            work = f"attention, {kernel}{default}"
            yield from _table(work, rate.table, f"; head {rate.head_size}, {rate.mask}, {rate.direction}")
            words = _attention_words(rate) + _kept(rate.sustained) + _substitute(limit)
            yield KindOfWork(work, words, _source(limit))
    work = f"attention, {'every kernel' if rates is None else 'other kernels'}"
    yield _of(work, device.attention_efficiency, "{:.3g} of the peak", "it counts as matmuls")


def _kept(part: measure.Sourced[Any]) -> str:
    """The share of a single call's rate that remains through a whole step, as text; "" if not known."""
    return "" if part.value is None else f"; {part.value:.3g} of it through a step"


def _attention_words(rate: measure.AttentionRate) -> str:
    """The rate as text, such as "195 TFLOP/s / (1 + 530 / length), head 128, causal"."""
    curve = f" / (1 + {rate.half_length.value:g} / length)" if rate.half_length.value else ""
    limit = (rate.limit_flops_per_s.value or 0.0) / 1e12
    head = f"head {rate.head_size}" + (f" (v {rate.value_head_size})" if rate.value_head_size else "")
    return f"{limit:.4g} TFLOP/s{curve}, {head}, {rate.mask} {rate.direction or ''}".rstrip()


def _kernels(cluster: measure.Cluster) -> Iterator[KindOfWork]:
    device = cluster.device
    bandwidth = (device.memory_bandwidth_bytes_per_s.value or 0.0) / 1e9
    memory = f"{{:.3g}} of {bandwidth:.4g} GB/s"
    yield _of("memory", device.memory_efficiency, memory, "it counts as at the datasheet's bandwidth")
    for work, table in ("memory, by operator", device.operators), ("steps of recurrences", device.scans):
        if table:
            sizes, first = sum(len(times.value or ()) for times in table.values()), next(iter(table.values()))
            figure = f"{len(table)} operators by times at {sizes} sizes{_substitute(first)}"
            yield KindOfWork(work, figure, first.source)
    floor = device.launch_overhead_s if device.kernel_floor_s.value is None else device.kernel_floor_s
    yield _of("launch of a kernel", floor, shown_time, "it takes no time")
    yield _of(
        "computing beside a collective", device.overlap_loss, "loses {:.3g} s a second", "loses nothing"
    )


def _host(cluster: measure.Cluster) -> Iterator[KindOfWork]:
    """The times of a host's work, the number of kernels launched ahead, and the scale of these times."""
    host = cluster.host
    if host is None:
        yield KindOfWork("host", f"{GAP}: it launches in no time")
        return
    for name, words in read_yaml(Path(__file__).with_name("tables.yaml"))["host"].items():
        yield _of(f"host, {words}", getattr(host, name), shown_time, "it takes no time")
    yield _of("host, launches ahead", host.launches_ahead, "{:g}", "as many as there are")
    if host.scale.value not in (None, 1):
        yield _of("host, scale of its times", host.scale, "{:.3g}", "1")


def _host_memory(cluster: measure.Cluster) -> Iterator[KindOfWork]:
    memory = cluster.host_memory
    shared = f", of a link of {memory.devices_per_link} devices" if memory.devices_per_link > 1 else ""
    rate, link = f"{{gb:.4g}} GB/s a device{shared}", memory.link_bandwidth_bytes_per_s
    yield _of("copy to or from the host", link, rate, "it cannot be timed", 1e9 * memory.devices_per_link)
    of_pageable = {"to": memory.pageable_to_host_bytes_per_s, "from": memory.pageable_to_device_bytes_per_s}
    for way, figure in of_pageable.items():
        yield _of(f"copy {way} pageable memory", figure, "{gb:.4g} GB/s a device", "as pinned memory")
    update = memory.update_bytes_per_s
    yield _of("update on the host's cores", update, "{gb:.4g} GB/s a node", "it cannot be timed")
    yield _of("memory of the host", memory.total_bytes, "{gb:.4g} GiB a node", "it has no limit", 2**30)


def _links(cluster: measure.Cluster) -> Iterator[KindOfWork]:
    links = {"intra-node": cluster.node_link if cluster.devices_per_node > 1 else None}
    for where, link in {**links, "inter-node": cluster.network}.items():
        if link is None:
            continue
        yield _of(f"send, {where}", link.bandwidth_bytes_per_s, "{gb:.4g} GB/s", "it cannot be timed")
        for each in link.crossings or ():
            work, rate = f"out of {each.devices} devices ({each.path})", each.bandwidth_bytes_per_s
            yield _of(work, rate, "{gb:.4g} GB/s together", "shared by nobody")
        if link.crossings is None:
            yield KindOfWork(f"ways that devices share, {where}", f"{GAP}: each has a link of its own")
        yield from _collectives(cluster, link, where)


def _collectives(cluster: measure.Cluster, link: measure.Link, where: str) -> Iterator[KindOfWork]:
    """The collectives that have rates of their own, then "other collectives"."""
    without = "by latency and bandwidth of a send's hops"
    if cluster.collective_model == "nccl":
        yield KindOfWork(f"collectives, {where}", "by NCCL's own model", "nccl")
        return
    rated = link.collectives if cluster.collective_model == "measured" else {}
    if cluster.collective_model == "measured":
        yield from _table(
            f"collectives, {where}", link.table, "; in place of the figures below" if rated else ""
        )
    for kind in get_args(measure.RatedCollective):
        work = f"{'other collectives' if kind == 'any' else kind}, {where}"
        for rate in rated.get(kind, ()):
            of = "nodes" if where == "inter-node" else "ranks"
            size, text = f", {rate.ranks} {of}", f"{{gb:.4g}} GB/s and {shown_time(rate.latency(2))}"
            yield _of(work + size * (rate.ranks is not None), rate.bandwidth_bytes_per_s, text, without)
    if "any" not in rated:
        yield KindOfWork(f"other collectives, {where}", f"{GAP}: {without}")
