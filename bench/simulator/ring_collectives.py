"""Collectives by latency and bandwidth of each hop: the ring algorithms (Thakur, Rabenseifner, Gropp 2005; as
NCCL uses for large messages), and pairwise exchange for all-to-all."""

from __future__ import annotations

from spbench.bench.simulator.group_links import GroupLinks

#: times that a collective of N ranks moves a payload in N pieces round the ring, N - 1 steps each
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


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
            share = min(1.0, group.cluster.network.nics_per_node / group.users[node] / devices)
            each = group.between.bandwidth * share
            outside = (group.size - devices) * (group.between.latency + piece / each)
        worst = max(worst, inside, outside)
    return worst
