"""The rates that a cluster's matmuls, attention kernels and links reach by size, as a simulation has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from spbench.bench import measure
from spbench.impls import WIRE_SHARE

#: n of a matmul [n, n] x [n, n], tokens of a sequence, bytes of a message
SIZES = [2**n for n in range(7, 16)]
LENGTHS = [2**n for n in range(9, 18)]
MESSAGES = [2**n for n in range(14, 34)]
#: the query heads and the key/value heads for which attention rates in a table are drawn
HEADS, GROUPS = 32, 8
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: the numbers of ranks of groups within a node, and the numbers of nodes of larger groups
_RANKS, _NODES = (2, 4, 8, 16, 32, 72), (2, 4, 16, 64)


@dataclass(frozen=True)
class RateCurve:
    """A line of a panel: a rate by size.

    Attributes:
        panel: the title of the panel.
        name: the name of the line.
        sizes: the sizes along the x axis: n of a matmul, tokens of a sequence, or bytes of a message.
        rates: the simulated rate at each size, in FLOPs or bytes a second.
        measured: the measured rates in the cluster's file, by size.
    """

    panel: str
    name: str
    sizes: Sequence[int]
    rates: Sequence[float]
    measured: Mapping[int, float] = field(default_factory=dict)


def product_curves(cluster: measure.Cluster) -> Iterator[RateCurve]:
    """Curves of the FLOPs a second of square matmuls by size, one for each precision that the card has."""
    device, costs = cluster.device, measure.Costs(cluster, measure.Calibration())
    for precision in get_args(measure.Precision):
        peak, own = device.peak_flops_per_s.get(precision), (device.matmul or {}).get(precision)
        if peak is None or peak.value is None:
            continue
        width = 4 if precision == "fp32" else 8 if precision == "fp64" else 2
        program = measure.ProgramBuilder((1,))
        for n in SIZES:
            flops, nbytes = 2.0 * n**3, 3.0 * width * n**2
            shape = (1, n, n, n)
            program.kernel(
                "mm", flops=flops, nbytes=nbytes, precision=precision, category=measure.MATMUL, shape=shape
            )
        seconds = costs.kernels(program.program()) + costs.launch_s
        rates = [2.0 * n**3 / each for n, each in zip(SIZES, seconds, strict=True)]
        yield RateCurve("Matmuls", precision, SIZES, rates, {} if own is None else _measured(own))


def _measured(rate: measure.MatmulRate | measure.AttentionRate) -> Mapping[int, float]:
    table = rate.table.value
    return rate.measured if table is None else measure.rates_along(table, HEADS, GROUPS)


def attention_curves(cluster: measure.Cluster) -> Iterator[RateCurve]:
    """Curves of the FLOPs a second of attention by sequence length, in a panel for each kernel."""
    attention = cluster.device.attention
    for kernel, rates in attention.kernels.items() if attention is not None else ():
        for rate in rates:
            at = list(map(rate.at, LENGTHS))
            if rate.table.value is not None:
                alike = [
                    measure.AttentionCall("forward", "causal", rate.head_size, HEADS, n, n, n)
                    for n in LENGTHS
                ]
                at = [measure.attention_rate(rate, call, GROUPS) for call in alike]
            values = f"/{rate.value_head_size}" if rate.value_head_size else ""
            name = f"{rate.head_size}{values}, {rate.mask}, {rate.direction or 'both'}"
            yield RateCurve(f"Attention, {kernel}", name, LENGTHS, at, _measured(rate))


def link_curves(cluster: measure.Cluster) -> Iterator[RateCurve]:
    """Curves of bus bandwidth (the bytes a second that a rank sends over the wire) by message size: each
    collective and a send, within a node and on two nodes, and an all-reduce by number of ranks."""
    node, costs = cluster.devices_per_node, measure.Costs(cluster, measure.Calibration())
    within = node > 1 and cluster.node_link is not None and cluster.node_link.known
    between = cluster.network.known and (node == 1 or within)
    panels = {"Within a node": (node, 1)} if within else {}
    for panel, (ranks, peer) in (panels | ({"On two nodes": (2 * node, node)} if between else {})).items():
        for kind in _KINDS:
            yield _link_curve(panel, kind, _collective(costs, kind, ranks), ranks, kind)
        yield _link_curve(panel, "send", _send(costs, [*range(peer)], peer), 2, "send")
    by_ranks = {f"{n} ranks": n for n in _RANKS if n <= node} if within else {}
    by_ranks |= {f"{n} nodes": n * node for n in _NODES} if between else {}
    for name, ranks in by_ranks.items():
        yield _link_curve("All-reduce by ranks", name, _collective(costs, _KINDS[0], ranks), ranks, _KINDS[0])


def _collective(costs: measure.Costs, kind: str, ranks: int) -> Callable[[int], float]:
    return lambda nbytes: costs.collectives(kind, nbytes, [range(ranks)])[0]


def _send(costs: measure.Costs, sources: Sequence[int], peer: int) -> Callable[[int], float]:
    """A function from bytes to the seconds of simultaneous sends, from each rank of ``sources`` to the rank
    ``peer`` places after it."""
    latency, per_byte = costs.transfers(sources, [rank + peer for rank in sources], 1)
    return lambda nbytes: float((latency + per_byte * nbytes).max())


def _link_curve(panel: str, name: str, seconds: Callable[[int], float], ranks: int, kind: str) -> RateCurve:
    share = float(WIRE_SHARE[kind](ranks))
    return RateCurve(panel, name, MESSAGES, [share * nbytes / seconds(nbytes) for nbytes in MESSAGES])
