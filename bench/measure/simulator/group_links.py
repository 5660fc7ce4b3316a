"""The links of process groups on a cluster, while all groups run the same collective; and the links that
sends and collectives share within a node: those out of PCIe switches, host bridges and sockets.

A cluster's file names the parts of a node (:class:`Crossing`). All bytes that leave a part at once share its
link. A ring leaves each part once, because NCCL orders rings by the topology; an all-to-all goes from each
device to each. Communication within one part is priced as if nodes had no parts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.measure.clusters.rates import Crossing
from spbench.impls import WIRE_SHARE


class LinkRate(NamedTuple):
    """The rate of a link in one direction: latency in seconds, bandwidth in bytes/s."""

    latency: float
    bandwidth: float


class GroupLinks(NamedTuple):
    """The links of a process group, while other groups of its kind run the same collective.

    Attributes:
        size: the number of ranks in the group.
        on_node: by node, how many devices the group has on the node.
        users: by node, how many of the groups leave the node at once.
        within, between: the rates of intra-node links and of one network card, after calibration.
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
        """The number of nodes on which the group has devices."""
        return len(self.on_node)

    @property
    def most_on_a_node(self) -> int:
        """The number of the group's devices on the node with most of them."""
        return max(self.on_node.values())

    @property
    def bandwidth(self) -> float:
        """The bytes/s of a ring through the group: of the links within a node or of its cards, the slower."""
        within = self.within.bandwidth if self.most_on_a_node > 1 else float("inf")
        return min(within, self.between.bandwidth * self.cards) if self.nodes > 1 else within

    @property
    def cards(self) -> float:
        """The group's share of a node's network cards, on the node where the share is smallest. Each group
        has rings on its cards; the only group of a node uses as many cards as its devices can feed."""
        return min(map(self.cards_of, self.on_node))

    def cards_of(self, node: int) -> float:
        """The number of network cards (a fraction if shared) by which the group leaves one of its nodes."""
        network, devices = self.cluster.network, self.on_node[node]
        most = 1 if network.one_card_a_part and devices < self.cluster.devices_per_node else devices
        return min(network.nics_per_node / self.users[node], most)


#: collectives whose whole payload passes each link of a chain
_IN_CHAINS = ("broadcast", "reduce")


def crossings_of(cluster: Cluster) -> list[Crossing]:
    """The links between parts of a node that its devices share; empty if the cluster's file has none."""
    return list((cluster.node_link and cluster.node_link.crossings) or ())


def crossed(cluster: Cluster, one: int, other: int) -> list[Crossing]:
    """The shared links between two ranks of a node, from the smallest parts of the node to the largest."""
    return [each for each in crossings_of(cluster) if one // each.devices != other // each.devices]


def seconds_a_byte(cluster: Cluster, sends: Sequence[tuple[int, int]]) -> list[float]:
    """For each send (source, destination) within a node, the least seconds for each byte, while all sends go
    on at once and share the links by which they leave a part of the node."""
    ways = [[(each, one // each.devices) for each in crossed(cluster, one, other)] for one, other in sends]
    leaving = Counter((each.devices, part) for way in ways for each, part in way)
    return [
        max((leaving[each.devices, part] / _bandwidth(each) for each, part in way), default=0.0)
        for way in ways
    ]


def shared_seconds(
    cluster: Cluster, kind: str, nbytes: float, groups: Sequence[Sequence[int]]
) -> list[float]:
    """The least seconds of one collective on each group, by the bytes that leave the parts of a node, while
    all groups run the same collective at once.

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
    """By part of a node, the bytes of a group that leave the part for other parts of the same node."""
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
