"""Seconds of collectives on the links of a process group, by three models: ring, measured and nccl.

Ring: the ring algorithms (Thakur, Rabenseifner, Gropp 2005; NCCL uses them for large messages), priced hop by
hop, and pairwise exchange for all-to-all. Measured: latency + wire bytes / bus bandwidth, by measured rates
in the cluster's file (:class:`BusRate`), or within a node by a table of measured collectives. A group on
several nodes moves its bytes on rings that leave the nodes by their network cards, at the slower of the
intra-node link and the group's share of the cards. Between nodes without a measured rate, an all-reduce adds
the latency of a tree of nodes, and a collective that NCCL sends only by rings adds the latency of each hop of
the ring (:func:`ring_hops`), which grows with the ranks.

Nccl: NCCL's tuning model, the least seconds over its algorithms and protocols: ring and tree, each by the
protocols LL (8-byte flags), LL128 (128-byte lines) and Simple, at latency + bytes / bandwidth. So small
messages go by protocols of low latency and, in an all-reduce, by trees. Facts from
NCCL 2.30.7, github.com/NVIDIA/nccl commit 5067397c2676d5aed50042fc39e5c8ee96eb0027, src/graph/tuning.cc
(ncclTunerConstantsDefaults, ncclTopoTuneModel, treeCorrectionFactor, ncclTopoGetAlgoTime). NVLS, CollNet and
PAT are not modelled. NCCL's correction of a tree's bandwidth jumps at powers of two of the size; here it is
interpolated, so that no larger message takes less time.
"""

from itertools import product
from math import ceil, log2
from pathlib import Path

import numpy as np

from spbench.bench.measure.clusters.rates import Generation, Link, NcclAlgorithm, NcclProtocol, NcclSettings
from spbench.bench.measure.simulator.group_links import GroupLinks
from spbench.bench.measure.simulator.table_prices import collective_seconds, latency_and_bandwidth
from spbench.bench.yaml_files import StrictModel, read_yaml, validate
from spbench.impls import WIRE_SHARE

#: times that a collective of N ranks moves a payload in N pieces round the ring, N - 1 steps each
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def ring_seconds(kind: str, nbytes: float, group: GroupLinks) -> float:
    """Seconds of a collective in rings over all members of the group.

    Args:
        kind: a key of :data:`WIRE_SHARE`.
        nbytes: the payload, as :data:`WIRE_SHARE` defines it.
        group: of two ranks or more.

    Raises:
        NotImplementedError: an unknown kind.
    """
    n, crossings = group.size, group.nodes - 1
    # a piece passes N - 1 links; between nodes, one less than there are nodes (as NCCL counts)
    latency = (n - 1 - crossings) * group.within.latency + crossings * group.between.latency
    bandwidth = group.bandwidth
    if kind in ROUNDS:
        return ROUNDS[kind] * (latency + (n - 1) * nbytes / n / bandwidth)
    if kind == "all_to_all":
        return pairwise_seconds(nbytes / n, group)
    if kind in ("broadcast", "reduce"):
        return latency + nbytes / bandwidth
    if kind == "barrier":
        return 2 * latency
    raise NotImplementedError(f"there is no cost for collective {kind!r}")


def pairwise_seconds(piece: float, group: GroupLinks, *, measured: bool = False) -> float:
    """Seconds in which each of a group's N ranks sends a piece of ``piece`` bytes to each other rank.
    Exchanges within a node and between nodes run at the same time. A piece that leaves a node goes at the
    rate of a send, or if ``measured`` at the network's rate of all-to-alls, whose latency counts once."""
    worst, once, (latency, card) = 0.0, 0.0, group.between
    if measured and group.cluster.network.rate_of("all_to_all", group.nodes) is not None:
        once, card, latency = *_between("all_to_all", group), 0.0
    for node, devices in group.on_node.items():
        inside = (
            (devices - 1) * (group.within.latency + piece / group.within.bandwidth) if devices > 1 else 0.0
        )
        outside = 0.0
        if devices < group.size:
            # the group's devices share the group's part of the node's cards
            each = card * group.cards_of(node) / devices
            outside = once + (group.size - devices) * (latency + piece / each)
        worst = max(worst, inside, outside)
    return worst


def measured_seconds(kind: str, nbytes: float, group: GroupLinks) -> float:
    """Seconds of a collective by the rates measured on its links; arguments as of :func:`ring_seconds`."""
    if kind not in WIRE_SHARE:
        raise NotImplementedError(f"there is no cost for collective {kind!r}")
    if kind == "all_to_all" and group.nodes > 1:
        return pairwise_seconds(nbytes / group.size, group, measured=True)
    if group.nodes == 1:
        by_table = collective_seconds(_node_link(group), kind, nbytes, group.size)
        if by_table is not None:
            return by_table / group.efficiency
    latency, bandwidth = 0.0, float("inf")
    if group.most_on_a_node > 1:
        latency, bandwidth = _within(kind, nbytes, group)
    if group.nodes > 1:
        between, card = _between(kind, group)
        latency, bandwidth = latency + between, min(bandwidth, card * group.cards)
    seconds = float(WIRE_SHARE[kind](group.size)) * nbytes / bandwidth
    if group.nodes > 1 and kind in _BY_RINGS and group.cluster.network.rate_of(kind, group.nodes) is None:
        return min(hops + seconds / reached for hops, reached in ring_hops(kind, group))
    return latency + seconds


def _node_link(group: GroupLinks) -> Link:
    return group.cluster.node_link or group.cluster.network


def _within(kind: str, nbytes: float, group: GroupLinks) -> tuple[float, float]:
    """(latency in seconds, bus bandwidth in bytes/s) of the part of a collective within a node."""
    link, ranks = _node_link(group), group.most_on_a_node
    if (by_table := latency_and_bandwidth(link, kind, nbytes, ranks)) is not None:
        return by_table[0], by_table[1] * group.efficiency
    rate = link.rate_of(kind, ranks)
    if rate is None:
        return group.within
    return rate.latency(ranks), (rate.bandwidth_bytes_per_s.value or float("nan")) * group.efficiency


def _between(kind: str, group: GroupLinks) -> tuple[float, float]:
    """(latency in seconds, bytes/s of one card) of the part of a collective between nodes."""
    latency, card = group.between
    rate = group.cluster.network.rate_of(kind, group.nodes)
    if rate is not None:
        latency = rate.latency(group.nodes)
        card = (rate.bandwidth_bytes_per_s.value or float("nan")) * group.efficiency
    else:
        latency *= ceil(log2(group.nodes)) * (2 if kind == "all_reduce" else 1)
    return latency, card


_US, _GB = 1e-6, 1e9

_Way = tuple[NcclAlgorithm, NcclProtocol]
#: a number for each algorithm and protocol
_ByWay = dict[NcclAlgorithm, dict[NcclProtocol, float]]


class _Facts(StrictModel):
    """The content of nccl_tuning.yaml, whose comments explain each field."""

    base: _ByWay
    nvlink: _ByWay
    network: _ByWay
    posting: dict[str, float]
    limits: dict[Generation, dict[str, list[float]]]
    ll_between: dict[str, list[float]]
    tree_percent: dict[NcclProtocol, list[int]]


_FACTS = validate(_Facts, read_yaml(Path(__file__).with_name("nccl_tuning.yaml")), "nccl_tuning.yaml")
_BASE, _NVLINK, _NETWORK = (
    {(algorithm, protocol): each for algorithm, of in facts.items() for protocol, each in of.items()}
    for facts in (_FACTS.base, _FACTS.nvlink, _FACTS.network)
)
_TREE_SHARE = {protocol: [each / 100 for each in of] for protocol, of in _FACTS.tree_percent.items()}
#: factors of the latency of a ring all-reduce over nodes by Simple, on other cards and on Volta; and the
#: bytes for each rank and channel from which on the factors hold
_PLATEAU, _PLATEAU_VOLTA, _PLATEAU_BYTES = 1.4, 1.9, 64

#: collectives that NCCL sends only by rings, and the share of a link's bandwidth that each protocol reaches
_BY_RINGS = ("all_gather", "reduce_scatter", "broadcast", "reduce")
_REACHED: dict[NcclProtocol, float] = {"ll128": 0.92, "simple": 1.0}


def nccl_seconds(kind: str, nbytes: float, group: GroupLinks) -> float:
    """Seconds of a collective by the fastest algorithm and protocol; arguments as of :func:`ring_seconds`.

    NCCL sends an all-to-all pair by pair (:func:`pairwise_seconds`).
    """
    if kind == "all_to_all":
        return pairwise_seconds(nbytes / group.size, group)
    if kind == "barrier":
        return nccl_seconds("all_reduce", 1.0, group)
    if kind not in ("all_reduce", *_BY_RINGS):
        raise NotImplementedError(f"there is no cost for collective {kind!r}")
    return min(way_seconds(kind, nbytes, group, way) for way in _ways(kind, group))


def ring_hops(kind: str, group: GroupLinks) -> list[tuple[float, float]]:
    """For LL128 and for Simple, (seconds of latency over all hops of a ring on several nodes, the share of
    the bandwidth that the protocol reaches). NCCL takes the protocol that is faster for a message."""
    n, crossings, ways = group.size, group.nodes - 1, []
    for protocol, reached in _REACHED.items():
        way: _Way = ("ring", protocol)
        inside, outside = n - 1 - crossings, crossings
        if kind in ("broadcast", "reduce"):  # as in _ring_latency
            inside, outside = 0, n
        latency = _BASE[way] + inside * _NVLINK[way] + outside * _NETWORK[way]
        ways.append((latency * _US, reached))
    return ways


def _ways(kind: str, group: GroupLinks) -> list[_Way]:
    """The (algorithm, protocol) pairs that a collective may take. Only an all-reduce may take trees."""
    settings = _settings(group)
    algorithms = [a for a in settings.algorithms if a == "ring" or kind == "all_reduce"]
    return list(product(algorithms or ["ring"], settings.protocols))


def _settings(group: GroupLinks) -> NcclSettings:
    assert group.cluster.nccl is not None, "clusters of this model have the settings"
    return group.cluster.nccl


def way_seconds(kind: str, nbytes: float, group: GroupLinks, way: _Way) -> float:
    """Seconds of a collective by one (algorithm, protocol); other arguments as of :func:`ring_seconds`."""
    bandwidth = _bus_bandwidth(kind, group, way)
    if way[0] == "ring":
        latency = _ring_latency(kind, nbytes, group, way)
        bandwidth *= group.size / _steps(kind, group.size)
    else:
        # an all-reduce goes up and down a tree of nodes, each of which is a chain of devices
        chain, depth = group.size // group.nodes - 1, int(log2(group.nodes))
        latency = _BASE[way] + 2 * (chain * _NVLINK[way] + depth * _NETWORK[way])
        places = log2(max(nbytes, 64.0) / 64.0)
        bandwidth *= 0.5 * float(np.interp(places, range(24), _TREE_SHARE[way[1]]))
    return latency * _US + nbytes / bandwidth


def _steps(kind: str, n: int) -> int:
    return ROUNDS[kind] * (n - 1) if kind in ROUNDS else n


def _bus_bandwidth(kind: str, group: GroupLinks, way: _Way) -> float:
    """The bus bandwidth of an algorithm and protocol: the bytes/s that each rank sends."""
    settings, (algorithm, protocol) = _settings(group), way
    limits, on = _FACTS.limits[settings.generation], min(group.nodes, 3) - 1
    channels = settings.channels.value or float("inf")
    link = group.bandwidth
    low_latency = (limits["ll"][0] if on == 0 else _FACTS.ll_between[settings.cpu][on - 1]) * _GB
    if algorithm == "ring":
        simple, of_ll, of_ll128 = link, link * 0.5, link * 0.92
    else:
        simple = min(link * 0.92, channels * limits["tree"][on] * _GB)
        of_ll, of_ll128 = simple / 3.8, simple * (7 / 9 if on == 0 else 120 / 128)
    by_protocol = {
        "ll": min(of_ll, low_latency),
        "ll128": min(of_ll128, channels * limits[f"{algorithm}_ll128"][on] * _GB),
        "simple": simple,
    }
    return by_protocol[protocol]


def _ring_latency(kind: str, nbytes: float, group: GroupLinks, way: _Way) -> float:
    """The latency of a ring in microseconds: one hop a step, of which nodes - 1 a round are between nodes."""
    n, nodes, hop = group.size, group.nodes, _NVLINK[way]
    if kind in ("broadcast", "reduce"):
        # on one node all channels go the same way, and pieces follow each other closely
        return _BASE[way] + (hop if nodes == 1 else n * _NETWORK[way])
    if nodes == 1:
        return _BASE[way] + _steps(kind, n) * hop
    settings = _settings(group)
    hop = max(hop, _FACTS.posting[settings.cpu] * (3 if way[1] == "simple" else 1))
    between = _NETWORK["tree" if group.most_on_a_node == 1 else "ring", way[1]]
    crossings = (2 if kind == "all_reduce" else 1) * (nodes - 1)
    latency = _BASE[way] + (_steps(kind, n) - crossings) * hop + crossings * between
    fills = nbytes >= _PLATEAU_BYTES * n * (settings.channels.value or 1)
    if way[1] == "simple" and kind == "all_reduce" and fills:
        latency *= _PLATEAU_VOLTA if settings.generation == "volta" else _PLATEAU
    return latency
