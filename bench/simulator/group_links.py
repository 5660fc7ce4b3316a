"""The links that a process group's collectives run on: within its nodes and between them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from spbench.bench.clusters.cluster import Cluster


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
        its node has them all, as far as its devices can feed them. Of the node that has fewest."""
        nics = self.cluster.network.nics_per_node
        return min(min(nics / self.users[node], devices) for node, devices in self.on_node.items())
