"""Floors of a step time: what its work takes at the promised rates, however well all else is hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.impls.place import Place

#: collectives of which a rank sends to each of the others, so that a share of it leaves the node
_TO_EACH = "all_to_all"
#: messages from a rank to the next, which leave a node by one card
_TO_NEXT = ("send", "recv")


def compute_floor_s(measurement: Mapping[str, Any]) -> float | None:
    """Seconds of the FLOPs of the model (nothing computed again) at what the card's datasheet promises; None:
    it promises nothing of this precision."""
    utilization, step_s = measurement["mfu"], measurement["step_time_s"]
    return None if utilization is None else float(utilization * step_s)


def links_floor_s(cell: Cell, measurement: Mapping[str, Any]) -> float | None:
    """Seconds of the bytes that a rank sends at the bandwidth of the links, those within a node and those
    across nodes at the same time; None: the cluster lacks a bandwidth that they need."""
    within_s = across_s = 0.0
    for row in measurement["formula"]:
        times = _row_s(cell, row)
        if times is None:
            return None
        within_s, across_s = within_s + times[0], across_s + times[1]
    return max(within_s, across_s)


def _row_s(cell: Cell, row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Seconds within a node and across nodes of one row of the closed form."""
    cluster, sent = load_cluster(cell.cluster), float(row["sent_bytes"])
    ranks, here = _members(cell, row["axis"].split("_"), cluster.devices_per_node)
    if not sent or ranks == 1:
        return 0.0, 0.0
    card = cluster.network.bandwidth_bytes_per_s.value
    node = cluster.node_link.bandwidth_bytes_per_s.value if cluster.node_link else card
    if not node or (here < ranks and not card):
        return None
    if here == ranks:
        return sent / node, 0.0
    assert card is not None
    share = card * min(1.0, cluster.network.nics_per_node / cluster.devices_per_node)
    if row["collective"] == _TO_EACH:
        leaves = (ranks - here) / (ranks - 1)
        return sent * (1 - leaves) / node, sent * leaves / share
    # of a ring one rank of a node sends to the next node, by the cards of all its ranks there
    by = share * here
    if row["collective"] in _TO_NEXT:
        by = min(by, card)
    return (sent / node if here > 1 else 0.0), sent / by


def _members(cell: Cell, axes: list[str], of_node: int) -> tuple[int, int]:
    """(ranks of the group along these axes, of them in one node)."""
    group = np.array(Place(cell.mesh_sizes).members(*axes))
    return len(group), int((group // of_node == group[0] // of_node).sum())
