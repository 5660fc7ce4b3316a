"""Seconds of collectives among the ranks of a mesh, each worked out once for all layouts that have it; and
floors of a step time: what its work takes at the promised rates, however well all else is hidden."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure import Costs, GroupLinks, load_cluster, model_parameters
from spbench.bench.tools.choose.layouts import ORDER, groups_of, of_one_axis
from spbench.impls import Place, folded_sizes, folds, given_folds

#: the axes of a mesh that have several ranks, and the ranks along all
_Place = tuple[tuple[str, ...], tuple[int, ...]]


class CollectivePrices:
    """Prices for one question.

    Args:
        cell: of the question.
    """

    def __init__(self, cell: Cell):
        self.cell = cell
        self._known: dict[tuple[str, float, _Place], float] = {}
        #: by axes and sizes
        self._meshes: dict[tuple[Any, ...], tuple[dict[str, int], _Place]] = {}
        self._groups: dict[_Place, tuple[list[list[int]], list[GroupLinks]]] = {}

    @cached_property
    def _costs(self) -> Costs:
        cluster = load_cluster(self.cell.cluster)
        calibration = cluster.calibration_of(self.cell.precision)
        return Costs(cluster, calibration, model_parameters(self.cell))

    @property
    def s_of_byte(self) -> float:
        """Seconds of a byte that a kernel moves through the card's memory; 0: not known."""
        bandwidth = self._costs.memory_bandwidth()
        return 1 / bandwidth if bandwidth > 0 else 0.0

    def seconds(
        self, collective: str, nbytes: float, axes: tuple[str, ...], sizes: Mapping[str, int]
    ) -> float:
        """Seconds of one call among the ranks along these axes, while all their groups call at once."""
        asked = (axes, *sizes.items())
        if asked not in self._meshes:
            mesh = {axis: sizes.get(axis, 1) for axis in ORDER}
            if axes and folds(axes):
                mesh = of_one_axis(mesh) | folded_sizes(mesh | given_folds(sizes))
            around = tuple(axis for axis in axes if mesh[axis] > 1)
            self._meshes[asked] = mesh, (around, tuple(mesh.values()))
        mesh, place = self._meshes[asked]
        if not place[0] or not nbytes or collective in ("recv", "barrier"):
            return 0.0
        key = (collective, nbytes, place)
        if key not in self._known:
            self._known[key] = self._seconds(collective, nbytes, place, mesh)
        return self._known[key]

    def _seconds(self, collective: str, nbytes: float, place: _Place, mesh: Mapping[str, int]) -> float:
        if place not in self._groups:
            groups = groups_of(place[0], mesh).tolist()
            self._groups[place] = groups, self._costs.links(groups)
        groups, links = self._groups[place]
        if collective == "send":
            nexts = np.roll(groups, -1, axis=1)
            latency, per_byte = self._costs.transfers(np.ravel(groups).tolist(), nexts.ravel().tolist(), 1)
            return float((latency + per_byte * nbytes).max())
        return max(self._costs.collectives(collective, nbytes, groups, links))


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
    """Seconds of one row of the closed form: within a node, and across nodes."""
    cluster, sent = load_cluster(cell.cluster), float(row["sent_bytes"])
    nodes = np.array(Place(cell.mesh_sizes).members(*row["axis"].split("_"))) // cluster.devices_per_node
    ranks, here = len(nodes), int((nodes == nodes[0]).sum())  # of the group, and of it in one node
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
