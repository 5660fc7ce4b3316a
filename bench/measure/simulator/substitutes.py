"""Substitutes: the rates that price work of a step for which the cluster has no rate of its own, such as a
kernel without a rate on the card, a link with only a datasheet, or a length that was not measured.

Three grades say how wrong a substitute may be. "substituted": no rate of the kind was measured, for example
an attention kernel is priced as matmuls, or a link by the datasheet or another machine. "transferred": the
rate is that of another card, kernel or host. "extrapolated": the rate is that of the same kernel or link at
another size, mask or group. The grade of a time also gives its interval (:mod:`measure.trust`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spbench.bench.measure.clusters.card_kernels import generation_of, played_kernel
from spbench.bench.measure.clusters.cluster import Grade
from spbench.bench.measure.clusters.figures import Sourced, named
from spbench.bench.measure.clusters.rates import AttentionRate, Link
from spbench.bench.measure.simulator import table_prices
from spbench.bench.measure.simulator.costs import Costs, node_of
from spbench.bench.measure.simulator.group_links import crossed, crossings_of
from spbench.bench.measure.simulator.program import ALIGNED, PRECISION_NAMES, Category, Kind, Program
from spbench.bench.measure.simulator.steps import Steps
from spbench.impls import GROUPED_MATMULS, SPARSE_ATTENTION

#: the substitute of attention for which a card has no rate
AS_MATMULS = "matmuls"


class Substitute(NamedTuple):
    """A kind of work without a rate of its own, and the rate that prices the work.

    Attributes:
        work: the work in words, such as "forward attention by triton".
        by: the rate in words, such as "matmuls".
        grade: see the top of this module.
    """

    work: str
    by: str
    grade: Grade


#: (a substitute, the numbers of the events or steps that it prices)
_Found = Iterator[tuple[Substitute, np.ndarray]]


def kernel_substitutes(costs: Costs, program: Program) -> _Found:
    """(a substitute, the events that it prices), for the kernels of a program."""
    yield from _attention(costs, program, program.of(Category.ATTENTION) & (program.flops > 0))
    yield from _matmuls(costs, program, program.of(Category.MATMUL))
    memory = np.flatnonzero(program.of(Category.MEMORY_BOUND))
    device = costs.cluster.device
    others = memory
    for name, times in device.operators.items():
        of_name = program.calls_of([name])[others]
        if times.substitute:
            yield Substitute("memory, by operator", times.substitute, "transferred"), others[of_name]
        others = others[~of_name]
    scans = memory[program.shape[memory].any(axis=1)]
    for name in np.unique(program.name[scans]).tolist():
        calls, steps = scans[program.name[scans] == name], device.scans.get(program.names[name])
        if text := "their bytes alone" if steps is None else steps.substitute:
            yield Substitute("steps of recurrences", text, "transferred" if steps else "substituted"), calls
    text = device.memory_efficiency.substitute or device.memory_bandwidth_bytes_per_s.substitute
    if device.memory_efficiency.value is None and costs.calibration.memory_efficiency == 1:
        text = "the datasheet's bandwidth"
    if text:
        yield Substitute("memory", text, "transferred"), others


def _attention(costs: Costs, program: Program, all_calls: np.ndarray) -> _Found:
    device, left = costs.cluster.device, all_calls.copy()
    own_share, rates = device.attention_efficiency.value is not None, device.attention
    sparse = program.calls_of(SPARSE_ATTENTION)
    kernel = played_kernel(device, costs.attention)
    for call, events, rate in costs.rated_attention(program):
        left[events] = False
        work = f"{call.direction} attention by {kernel}"
        if sparse[events[0]]:
            work = f"{call.direction} attention to chosen keys"
            yield Substitute(work, f"{kernel}'s rate over these keys", "substituted"), events
        elif text := rate.limit_flops_per_s.substitute:
            yield Substitute(work, text, "transferred"), events
        elif text := _unlike(rate, call):
            yield Substitute(work, f"its rate {text}", "extrapolated"), events
    default = costs.attention == "flash" or rates is None or costs.attention == rates.default
    for name in np.unique(program.name[left]).tolist():
        events = np.flatnonzero(left & (program.name == name))
        # softmax attention has a shape; linear and sparse attention are operators of their own
        softmax = program.shape[events[0]].any() and not sparse[events[0]]
        kernel = "attention" if costs.attention == "flash" else f"attention by {costs.attention}"
        work = kernel if softmax else program.names[name]
        if not own_share:
            yield Substitute(work, AS_MATMULS, "substituted"), events
        elif text := device.attention_efficiency.substitute:
            yield Substitute(work, text, "transferred"), events
        elif rates is not None and not (default and softmax):
            yield Substitute(work, f"{rates.default}'s share of the peak", "transferred"), events


def _unlike(rate: AttentionRate, call: table_prices.AttentionCall) -> str:
    """How the measured calls of a rate differ from ``call``, in words; "" if they do not differ."""
    words = []
    if rate.direction not in (None, call.direction):
        words.append(f"{rate.direction}")
    if rate.mask != call.mask:
        words.append("with a causal mask" if rate.mask == "causal" else "without a mask")
    if rate.counts_as(call.direction) != call.head_size:
        words.append(f"at head size {rate.head_size}")
    shortest, longest = table_prices.lengths_measured(rate) or (0, call.length)
    if call.length > longest:
        words.append(f"up to {longest} tokens")
    elif call.length < shortest:
        words.append(f"from {shortest} tokens")
    return ", ".join(words)


def _matmuls(costs: Costs, program: Program, calls: np.ndarray) -> _Found:
    device, fitted = costs.cluster.device, costs.calibration.compute_efficiency != 1
    for number, name in enumerate(PRECISION_NAMES):
        own, peak = named(device.matmul, name), named(device.peak_flops_per_s, name)
        share = device.compute_efficiency if own is None else own.share
        events = np.flatnonzero(calls & (program.precision == number))
        if (grouped := named(device.grouped_matmul, name)) is not None:
            of_experts = program.calls_of(GROUPED_MATMULS)[events]
            if text := grouped.share.substitute:
                yield Substitute(f"grouped {name} matmuls", text, "transferred"), events[of_experts]
            events = events[~of_experts]
        if text := share.substitute or (peak.substitute if peak else ""):
            yield Substitute(f"{name} matmuls", text, "transferred"), events
        elif share.value is None and not fitted:
            yield Substitute(f"{name} matmuls", "the datasheet's peak", "substituted"), events
        elif device.matmul and own is None and not fitted:
            yield Substitute(f"{name} matmuls", "the share of other precisions", "transferred"), events
        if own is not None and own.table.value is not None and not own.share.substitute:
            shaped = events[program.shape[events].any(axis=1)]
            table = table_prices.rate_table(own.table.value)
            covered = table.covers(table_prices.matmul_sizes(table, program.shape[shaped]))
            by = "the nearest of its table"
            yield Substitute(f"{name} matmuls", by, "extrapolated"), shaped[~covered]
            if own.sustained.value is None:  # the share of its rates that a whole step keeps is not known
                by = "its table of short calls, without a power limit"
                yield Substitute(f"{name} matmuls", by, "extrapolated"), shaped[covered]
        if name in ("fp16", "bf16") and generation_of(device) >= 7 and not (own and own.unaligned):
            unaligned = events[program.aligned[events] < ALIGNED]
            yield Substitute(f"{name} matmuls of unaligned rows", "aligned ones", "substituted"), unaligned


def transfer_substitutes(costs: Costs, steps: Steps) -> _Found:
    """(a substitute, the steps that it prices), for the communication of a program's first rank; each part of
    a collective, intra-node or inter-node, has its own substitutes."""
    kinds, _, partners = steps.columns
    names = steps.program.name[steps.at]
    moving = np.flatnonzero((kinds == Kind.COLLECTIVE) | (kinds == Kind.SEND))
    codes = np.stack([kinds[moving], names[moving], partners[moving]], axis=1)
    distinct, places = np.unique(codes, axis=0, return_inverse=True)
    for number, (kind, name, partner) in enumerate(distinct.tolist()):
        at = moving[places.ravel() == number]
        for each in _of_transfer(costs, steps, kind, steps.program.names[name], partner):
            yield each, at


def _of_transfer(costs: Costs, steps: Steps, kind: int, name: str, partner: int) -> Iterator[Substitute]:
    rank, program = int(steps.ranks[0]), steps.program
    if kind == Kind.SEND:
        peer = int(steps.peers(partner)[0])
        if peer != rank:
            within = costs.node(peer) == costs.node(rank)
            yield from _of_link(costs, "send", within, None)
            yield from _of_crossings(costs, "send", _furthest(costs, steps.all_ranks, steps.peers(partner)))
        return
    members = program.groups[partner].members(rank, program.mesh)
    yield from _of_crossings(costs, name, members)
    on_node = Counter(costs.node(member) for member in members)
    most, nodes = max(on_node.values()), len(on_node)
    if most > 1:
        yield from _of_link(costs, name, True, most)
    if nodes > 1:
        yield from _of_link(costs, name, False, nodes)


def _furthest(costs: Costs, ranks: np.ndarray, peers: np.ndarray) -> list[int]:
    """[source, destination]: the send from a rank to its peer that crosses the largest parts of a node,
    because the other ranks of a ring wait for this send; the first send if none crosses a part."""
    for each in reversed(crossings_of(costs.cluster)):
        same_node = node_of(ranks, costs.cluster) == node_of(peers, costs.cluster)
        leaves = np.flatnonzero(same_node & (ranks // each.devices != peers // each.devices))
        if len(leaves):
            return [int(ranks[leaves[0]]), int(peers[leaves[0]])]
    return [int(ranks[0]), int(peers[0])]


def _of_crossings(costs: Costs, name: str, members: Sequence[int]) -> Iterator[Substitute]:
    """The substitutes that price shared links within a node; only links between the largest parts count."""
    here = [member for member in members if costs.node(member) == costs.node(members[0])]
    link, work = costs.cluster.node_link, f"{name} intra-node"
    if link is not None and link.crossings is None and len(here) > 1:
        yield Substitute(work, "links that no devices share", "extrapolated")
    for each in crossed(costs.cluster, min(here), max(here))[-1:]:
        if text := each.bandwidth_bytes_per_s.substitute:
            yield Substitute(f"{work} ({each.path})", text, "substituted")


def _of_link(costs: Costs, name: str, within: bool, parts: int | None) -> Iterator[Substitute]:
    """The substitutes that price the intra-node (``within``) or inter-node part of a communication ``name``.

    Args:
        parts: for a collective, the number of its devices on a node, or of its nodes; None: a send.
    """
    cluster = costs.cluster
    link: Link = (cluster.node_link or cluster.network) if within else cluster.network
    work = f"{name} {'intra-node' if within else 'inter-node'}"
    rated = cluster.collective_model == "measured" and parts is not None
    rate = link.rate_of(name, parts or 0) if rated else None
    tables = table_prices.collective_tables(link.table.value) if rated and within and link.table.value else {}
    if (table := tables.get(name)) is not None:
        if link.table.substitute:
            yield Substitute(work, link.table.substitute, "substituted")
        elif (parts or 0) > table.largest[0]:
            yield Substitute(work, f"its rate of {int(table.largest[0])} ranks", "extrapolated")
    elif rate is not None:
        figure: Sourced[float] = rate.bandwidth_bytes_per_s
        if figure.substitute:
            yield Substitute(work, figure.substitute, "substituted")
        elif text := _other_group(link, name, parts or 0):
            yield Substitute(work, text, "extrapolated")
    elif text := link.bandwidth_bytes_per_s.substitute:
        yield Substitute(work, text, "substituted")
    elif parts is not None and cluster.collective_model != "nccl":
        yield Substitute(work, "the bandwidth of a send", "extrapolated")


def _other_group(link: Link, name: str, parts: int) -> str:
    """The rate that is used in place of the collective's own, in words; "" if its own rate fits the group."""
    if name == "all_to_all" and name not in link.collectives:
        return "the rate of other collectives"
    sizes = [rate.ranks for rate in link.rates_of(name) if rate.ranks is not None]
    if sizes and not min(sizes) <= parts <= max(sizes):
        return f"its rate of {min(sizes) if parts < min(sizes) else max(sizes)} ranks"
    return ""


def seconds_by_substitute(
    costs: Costs, of_programs: Iterable[tuple[Steps, np.ndarray, np.ndarray]], host_s: float
) -> dict[Substitute, float]:
    """The seconds of a step that each substitute prices, hidden or not, in the mean over ranks.

    Args:
        of_programs: (steps, [events] seconds of the kernels, [steps] seconds of the first rank's steps), for
            each program.
        host_s: the seconds that ranks wait for their hosts, in the mean.
    """
    found: dict[Substitute, float] = defaultdict(float)
    for steps, kernel_s, step_s in of_programs:
        share = len(steps.all_ranks) / steps.program.world
        for each, events in kernel_substitutes(costs, steps.program):
            found[each] += float(kernel_s[events].sum()) * share
        for each, at in transfer_substitutes(costs, steps):
            found[each] += float(np.nansum(step_s[at])) * share
    host = costs.cluster.host
    if host is not None and host.scale.substitute:
        found[Substitute("host", host.scale.substitute, "transferred")] += host_s
    return {each: seconds for each, seconds in found.items() if seconds > 0}
