"""Seconds of collectives among the ranks of a mesh, each worked out once for all layouts that have it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.group_links import GroupLinks
from spbench.bench.tools.advise.layouts import ORDER, groups_of, of_one_axis
from spbench.impls.folding import folded_sizes, folds, given_folds

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
        """Seconds of one call among the ranks along these axes, all of whose groups call at once."""
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
