"""The links of process groups on a cluster, while all of them run the same collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from spbench.bench.measure.clusters.cluster import Cluster


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


def links_of(
    groups: Sequence[Sequence[int]], cluster: Cluster, within: LinkRate, between: LinkRate, efficiency: float
) -> list[GroupLinks]:
    """The links of groups that all run the same collective at once. Groups with as many devices, and as many
    users beside, on each of their nodes have the same object."""
    of_node, known = cluster.devices_per_node, dict[tuple[tuple[int, int], ...], GroupLinks]()
    on_nodes = [Counter([rank // of_node for rank in members]) for members in groups]
    users = Counter([node for each in on_nodes if len(each) > 1 for node in each])
    keys = [tuple(sorted([(n, users[node]) for node, n in each.items()])) for each in on_nodes]
    for key, each in zip(keys, on_nodes, strict=True):
        if key not in known:
            known[key] = GroupLinks(cluster, each.total(), each, users, within, between, efficiency)
    return [known[key] for key in keys]
