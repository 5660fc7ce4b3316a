"""What a kernel, a transfer and a collective cost on a cluster.

Kernels: the roofline, max(FLOPs / rate, bytes / bandwidth), plus a launch overhead. Communication: latency
plus bytes over bandwidth, by the ring algorithms (Thakur, Rabenseifner, Gropp 2005; as NCCL uses for large
messages) and by pairwise exchange for all-to-all. Ranks fill nodes in order. Within a node each device has
a link of its own; between nodes, those that send at once share the node's network cards. Different
collectives that overlap in time do not slow each other down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from spbench.bench.files.cluster import Calibration, Cluster
from spbench.bench.simulator.program import KERNEL, PRECISION_NAMES, Program

#: times that a collective of N ranks moves a payload in N pieces round the ring, N - 1 steps each
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


class RatesUnknown(ValueError):
    """The cluster profile lacks a figure without which a time cannot be known."""


def check_rates(cluster: Cluster, precision: str, world: int) -> None:
    """Raise :class:`RatesUnknown` unless the cluster has all figures to time this many ranks."""
    device = cluster.device
    rate = device.peak_flops_per_s.get(precision)  # type: ignore[call-overload]
    if rate is None or rate.value is None:
        raise RatesUnknown(f"{cluster.name}: device.peak_flops_per_s has no {precision}")
    if device.memory_bandwidth_bytes_per_s.value is None:
        raise RatesUnknown(f"{cluster.name}: device.memory_bandwidth_bytes_per_s is unknown")
    links = [cluster.node_link] if cluster.node_link and cluster.devices_per_node > 1 and world > 1 else []
    if world > (cluster.devices_per_node if links else 1):
        links.append(cluster.network)
    for link in links:
        assert link is not None
        if link.latency_s.value is None or link.bandwidth_bytes_per_s.value is None:
            raise RatesUnknown(f"{cluster.name}: a link's latency or bandwidth is unknown")


Ranks = TypeVar("Ranks", int, np.ndarray)


def node_of(ranks: Ranks, cluster: Cluster) -> Ranks:
    """The node of a rank, or of each of an array of them."""
    return ranks // cluster.devices_per_node


class Costs:
    """Prices on a cluster, with calibration.

    Args:
        cluster: the profile.
        calibration: its correction; the default takes datasheets at their word.
        parameters: of the whole model.

    Attributes:
        step_overhead_s: of a step, beside its kernels and its communication.
    """

    def __init__(self, cluster: Cluster, calibration: Calibration, parameters: int = 0):
        self.cluster, self.calibration = cluster, calibration
        self.step_overhead_s = calibration.step_overhead_s + parameters * calibration.parameter_overhead_s
        device = cluster.device
        self.launch_s = device.launch_overhead_s.value or 0.0
        self.rates = [
            (figure.value or 0.0) if (figure := device.peak_flops_per_s.get(name)) is not None else 0.0  # type: ignore[call-overload]
            for name in PRECISION_NAMES
        ]
        network, node = cluster.network, cluster.node_link or cluster.network
        # a missing figure is refused by check_rates where it matters; here it only must not be used
        self.between = (network.latency_s.value or 0.0, self._bandwidth(network.bandwidth_bytes_per_s.value))
        self.within = (node.latency_s.value or 0.0, self._bandwidth(node.bandwidth_bytes_per_s.value))
        self.nics = network.nics_per_node

    def _bandwidth(self, value: float | None) -> float:
        return (value or float("nan")) * self.calibration.link_efficiency

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return node_of(rank, self.cluster)

    def kernels(self, program: Program) -> np.ndarray:
        """Seconds of each event that is a kernel, without launch overhead; 0 for the others."""
        device, calibration = self.cluster.device, self.calibration
        rates = np.array(self.rates) * calibration.compute_efficiency
        computing = program.flops > 0
        rate = rates[program.precision]
        if np.any(rate[computing] == 0):
            missing = {PRECISION_NAMES[i] for i in np.unique(program.precision[computing & (rate == 0)])}
            raise RatesUnknown(
                f"{self.cluster.name}: device.peak_flops_per_s has no {', '.join(sorted(missing))}"
            )
        bandwidth = (
            device.memory_bandwidth_bytes_per_s.value or float("nan")
        ) * calibration.memory_efficiency
        compute = np.divide(program.flops, rate, out=np.zeros(len(program)), where=computing)
        seconds = (
            np.maximum(compute, program.nbytes / bandwidth) + program.strided * calibration.strided_element_s
        )
        return np.where(program.kind == KERNEL, seconds, 0.0)

    def transfers(
        self, sources: Sequence[int], destinations: Sequence[int], at_once: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(latency in seconds, seconds a byte) of the transfer from each source to its destination.

        All sources send at once, each to ``at_once`` peers.
        """
        leaving = Counter(
            self.node(s) for s, d in zip(sources, destinations, strict=True) if self.node(s) != self.node(d)
        )
        latency, per_byte = [], []
        for s, d in zip(sources, destinations, strict=True):
            if s == d:
                seconds, bandwidth = 0.0, float("inf")
            elif self.node(s) == self.node(d):
                seconds, bandwidth = self.within
            else:
                seconds, nic = self.between
                bandwidth = self._shared(nic, leaving[self.node(s)])
            latency.append(seconds)
            per_byte.append(at_once / bandwidth)
        return np.array(latency), np.array(per_byte)

    def _shared(self, nic: float, users: int) -> float:
        """A user's bandwidth out of a node where that many leave it at once: a card's at most."""
        return nic * min(1.0, self.nics / users)

    def collectives(self, kind: str, nbytes: float, groups: Sequence[Sequence[int]]) -> list[float]:
        """Seconds of one collective on each of the groups, which all run it at once."""
        users: Counter[int] = Counter()
        for members in groups:
            nodes = {self.node(rank) for rank in members}
            if len(nodes) > 1:
                users.update(nodes)
        return [self._collective(kind, nbytes, members, users) for members in groups]

    def _collective(self, kind: str, nbytes: float, members: Sequence[int], users: Counter[int]) -> float:
        n = len(members)
        if n == 1:
            return 0.0
        on_node = Counter(self.node(rank) for rank in members)
        # a piece passes N - 1 links, one less than there are nodes of them between nodes (as NCCL counts)
        crossings = len(on_node) - 1
        latency = (n - 1 - crossings) * self.within[0] + crossings * self.between[0] if n > 1 else 0.0
        bandwidth = self.within[1] if max(on_node.values()) > 1 else float("inf")
        if crossings:
            # one ring a card: a group alone on its node has them all, as far as its devices can feed them
            cards = min(min(self.nics / users[node], devices) for node, devices in on_node.items())
            bandwidth = min(bandwidth, self.between[1] * cards)
        if kind in _ROUNDS:
            return _ROUNDS[kind] * (latency + (n - 1) * nbytes / n / bandwidth)
        if kind == "all_to_all":
            return self._all_to_all(nbytes / n, n, on_node, users)
        if kind in ("broadcast", "reduce"):
            return latency + nbytes / bandwidth
        if kind == "barrier":
            return 2 * latency
        raise NotImplementedError(f"no cost is known for collective {kind!r}")

    def _all_to_all(self, piece: float, n: int, on_node: Counter[int], users: Counter[int]) -> float:
        """n - 1 exchanges of a piece; those within a node and those between nodes go on side by side."""
        worst = 0.0
        for node, devices in on_node.items():
            inside = (devices - 1) * (self.within[0] + piece / self.within[1]) if devices > 1 else 0.0
            outside = 0.0
            if devices < n:
                # the group's devices leave by its share of the node's cards
                each = self.between[1] * min(1.0, self.nics / users[node] / devices)
                outside = (n - devices) * (self.between[0] + piece / each)
            worst = max(worst, inside, outside)
        return worst
