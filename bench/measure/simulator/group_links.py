"""The links of process groups on a cluster, while all of them run the same collective; and what sends and
collectives share within a node: the ways out of PCIe switches, host bridges and sockets.

A cluster's file names the parts of a node (:class:`Crossing`). All that leaves a part at once shares its way
out; a ring leaves each part once, as NCCL orders it by the topology, and all-to-alls go from each device to
each. What shares nothing is priced as if there were no parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.measure.clusters.rates import Crossing
from spbench.impls import WIRE_SHARE


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
        within, between: intra-node links and from one network card, as a calibration corrects them.
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
        """How many devices the group has on the node with most of them."""
        return max(self.on_node.values())

    @property
    def bandwidth(self) -> float:
        """The bandwidth of a ring through the group: of links within a node or of its cards, the slower."""
        within = self.within.bandwidth if self.most_on_a_node > 1 else float("inf")
        return min(within, self.between.bandwidth * self.cards) if self.nodes > 1 else within

    @property
    def cards(self) -> float:
        """Network cards of a node for each group that leaves it, on the node with fewest. Each group has a
        ring on its cards: alone on its node, it has all of them, as far as its devices can feed them."""
        return min(map(self.cards_of, self.on_node))

    def cards_of(self, node: int) -> float:
        """Cards by which the group leaves one of its nodes."""
        network, devices = self.cluster.network, self.on_node[node]
        most = 1 if network.one_card_a_part and devices < self.cluster.devices_per_node else devices
        return min(network.nics_per_node / self.users[node], most)


def links_of(
    groups: Sequence[Sequence[int]], cluster: Cluster, within: LinkRate, between: LinkRate, efficiency: float
) -> list[GroupLinks]:
    """The links of groups that all run the same collective at once. Two groups share one object if their
    nodes have equally many members and are left by equally many groups."""
    of_node, known = cluster.devices_per_node, dict[tuple[tuple[int, int], ...], GroupLinks]()
    on_nodes = [Counter([rank // of_node for rank in members]) for members in groups]
    users = Counter([node for each in on_nodes if len(each) > 1 for node in each])
    keys = [tuple(sorted([(n, users[node]) for node, n in each.items()])) for each in on_nodes]
    for key, each in zip(keys, on_nodes, strict=True):
        if key not in known:
            known[key] = GroupLinks(cluster, each.total(), each, users, within, between, efficiency)
    return [known[key] for key in keys]


#: of these the whole payload passes each link of a chain
_IN_CHAINS = ("broadcast", "reduce")


def crossings_of(cluster: Cluster) -> list[Crossing]:
    """The ways between parts of a node that its devices share; none if they are not known."""
    return list((cluster.node_link and cluster.node_link.crossings) or ())


def crossed(cluster: Cluster, one: int, other: int) -> list[Crossing]:
    """The crossings between two ranks of a node, from the smallest parts to the largest."""
    return [each for each in crossings_of(cluster) if one // each.devices != other // each.devices]


def seconds_a_byte(cluster: Cluster, sends: Sequence[tuple[int, int]]) -> list[float]:
    """The least seconds a byte of each send, as (source, destination), within nodes; all go on at once, so
    sends share the links by which they leave a part of a node."""
    ways = [[(each, one // each.devices) for each in crossed(cluster, one, other)] for one, other in sends]
    leaving = Counter((each.devices, part) for way in ways for each, part in way)
    return [
        max((leaving[each.devices, part] / _bandwidth(each) for each, part in way), default=0.0)
        for way in ways
    ]


def shared_seconds(
    cluster: Cluster, kind: str, nbytes: float, groups: Sequence[Sequence[int]]
) -> list[float]:
    """The least seconds of one collective on each of the groups, which all run it at once, by the bytes that
    leave the parts of a node.

    Args:
        nbytes: the payload, as :data:`WIRE_SHARE` defines it.
    """
    seconds = [0.0] * len(groups)
    for each in crossings_of(cluster):
        sent: Counter[int] = Counter()
        leaves = [_leaving(cluster, each, kind, nbytes, members) for members in groups]
        for of_group in leaves:
            sent.update(of_group)
        for number, of_group in enumerate(leaves):
            taken = max((sent[part] for part in of_group), default=0) / _bandwidth(each)
            seconds[number] = max(seconds[number], taken)
    return seconds


def _leaving(
    cluster: Cluster, crossing: Crossing, kind: str, nbytes: float, members: Sequence[int]
) -> dict[int, int]:
    """By part of a node, the bytes of a group that leave it for other parts of the same node."""
    in_part = Counter(rank // crossing.devices for rank in members)
    a_node = cluster.devices_per_node // crossing.devices
    on_node: Counter[int] = Counter()
    for part, ranks in in_part.items():
        on_node[part // a_node] += ranks
    others = {part: on_node[part // a_node] - ranks for part, ranks in in_part.items()}
    size = len(members)
    if kind == "all_to_all":
        return {part: round(in_part[part] * rest * nbytes / size) for part, rest in others.items() if rest}
    a_hop = nbytes if kind in _IN_CHAINS else float(WIRE_SHARE[kind](size)) * nbytes
    return {part: round(a_hop) for part, rest in others.items() if rest}


def _bandwidth(crossing: Crossing) -> float:
    return crossing.bandwidth_bytes_per_s.value or float("inf")
