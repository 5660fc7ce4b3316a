"""Collectives on the links of a process group: by the rates of each hop, or by what was measured.

By hops: the ring algorithms (Thakur, Rabenseifner, Gropp 2005; as NCCL uses for large messages), and pairwise
exchange for all-to-all. Measured: latency + wire bytes / bus bandwidth, with the rates that stand with the
links of a cluster (:class:`BusRate`). There a group on several nodes moves its bytes on rings that leave the
nodes by their cards, at the slower of the links within a node and the group's share of the cards. Its latency
is that within a node and, between nodes, that of a tree of them.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, log2
from typing import NamedTuple

from spbench.bench.measure.clusters.cluster import Cluster
from spbench.impls.traffic import WIRE_SHARE

#: times that a collective of N ranks moves a payload in N pieces round the ring, N - 1 steps each
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


class LinkRate(NamedTuple):
    """A link, one way: latency in seconds, bandwidth in bytes a second."""

    latency: float
    bandwidth: float


class GroupLinks(NamedTuple):
    """A process group on a cluster, while other groups of its kind run the same collective.

    Attributes:
        size: ranks of the group.
        on_node: of each node that it has devices on, how many.
        users: of each node, how many of the groups leave it at once.
        within, between: links within a node and from one network card, as a calibration corrects them.
        efficiency: the calibration's share of every link's bandwidth.
    """

    cluster: Cluster
    size: int
    on_node: Counter[int]
    users: Counter[int]
    within: LinkRate
    between: LinkRate
    efficiency: float

    @property
    def nodes(self) -> int:
        """Nodes that the group has devices on."""
        return len(self.on_node)

    @property
    def most_on_a_node(self) -> int:
        """The group's devices on the node that has most of them."""
        return max(self.on_node.values())

    @property
    def cards(self) -> float:
        """Network cards of a node for each of the groups that leave it: a ring on each, so a group alone on
        its node has them all, as far as its devices can feed them. The node that has fewest counts."""
        return min(map(self.cards_of, self.on_node))

    def cards_of(self, node: int) -> float:
        """Cards by which the group leaves one of its nodes."""
        network, devices = self.cluster.network, self.on_node[node]
        most = 1 if network.one_card_a_part and devices < self.cluster.devices_per_node else devices
        return min(network.nics_per_node / self.users[node], most)


def ring_seconds(kind: str, nbytes: float, group: GroupLinks) -> float:
    """Seconds of a collective.

    Args:
        kind: a key of :data:`WIRE_SHARE`.
        nbytes: the payload, as it is defined there.
        group: of two ranks or more.

    Raises:
        NotImplementedError: an unknown kind.
    """
    n, crossings = group.size, group.nodes - 1
    # a piece passes N - 1 links, one less than there are nodes of them between nodes (as NCCL counts)
    latency = (n - 1 - crossings) * group.within.latency + crossings * group.between.latency
    bandwidth = group.within.bandwidth if group.most_on_a_node > 1 else float("inf")
    if crossings:
        bandwidth = min(bandwidth, group.between.bandwidth * group.cards)
    if kind in ROUNDS:
        return ROUNDS[kind] * (latency + (n - 1) * nbytes / n / bandwidth)
    if kind == "all_to_all":
        return pairwise_seconds(nbytes / n, group)
    if kind in ("broadcast", "reduce"):
        return latency + nbytes / bandwidth
    if kind == "barrier":
        return 2 * latency
    raise NotImplementedError(f"no cost is known for collective {kind!r}")


def pairwise_seconds(piece: float, group: GroupLinks) -> float:
    """Seconds of N - 1 exchanges of a piece of that many bytes; those within a node and those between nodes
    go on side by side."""
    worst = 0.0
    for node, devices in group.on_node.items():
        inside = (
            (devices - 1) * (group.within.latency + piece / group.within.bandwidth) if devices > 1 else 0.0
        )
        outside = 0.0
        if devices < group.size:
            # the group's devices leave by its share of the node's cards
            each = group.between.bandwidth * group.cards_of(node) / devices
            outside = (group.size - devices) * (group.between.latency + piece / each)
        worst = max(worst, inside, outside)
    return worst


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
