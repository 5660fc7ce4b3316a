"""Collectives by what they were measured to reach: latency + wire bytes / bus bandwidth.

The rates stand with the links of a cluster (:class:`BusRate`). A group on several nodes moves its bytes on
rings that leave the nodes by their cards, so at the slower of the links within a node and the group's share
of the cards. Its latency is that within a node and, between nodes, that of a tree of them.
"""

from __future__ import annotations

from math import ceil, log2

from spbench.bench.simulator.group_links import GroupLinks
from spbench.bench.simulator.ring_collectives import pairwise_seconds
from spbench.impls.traffic import WIRE_SHARE


def measured_seconds(kind: str, nbytes: float, group: GroupLinks) -> float:
    """Seconds of a collective; see :func:`ring_seconds`."""
    if kind not in WIRE_SHARE:
        raise NotImplementedError(f"no cost is known for collective {kind!r}")
    if kind == "all_to_all" and group.nodes > 1:
        return pairwise_seconds(nbytes / group.size, group)
    latency, bandwidth = 0.0, float("inf")
    if group.most_on_a_node > 1:
        latency, bandwidth = _within(kind, group)
    if group.nodes > 1:
        between, share = _between(kind, group)
        latency, bandwidth = latency + between, min(bandwidth, share)
    return latency + float(WIRE_SHARE[kind](group.size)) * nbytes / bandwidth


def _within(kind: str, group: GroupLinks) -> tuple[float, float]:
    """Latency and bus bandwidth of the part of a collective that is within a node."""
    link, ranks = group.cluster.node_link or group.cluster.network, group.most_on_a_node
    rate = link.rate_of(kind, ranks)
    if rate is None:
        return group.within
    return rate.latency(ranks), (rate.bandwidth_bytes_per_s.value or float("nan")) * group.efficiency


def _between(kind: str, group: GroupLinks) -> tuple[float, float]:
    """Latency and bus bandwidth of the part of a collective that is between nodes."""
    latency, card = group.between
    rate = group.cluster.network.rate_of(kind, group.nodes)
    if rate is not None:
        latency = rate.latency(group.nodes)
        card = (rate.bandwidth_bytes_per_s.value or float("nan")) * group.efficiency
    else:
        latency *= ceil(log2(group.nodes)) * (2 if kind == "all_reduce" else 1)
    return latency, card * group.cards
