"""Stages of a pipeline traced by several workers at once: each keeps its trace on disk, where the worker that
examines the whole cell finds it."""

from __future__ import annotations

from collections.abc import Sequence

from spbench.bench.cell import Cell
from spbench.bench.disk_cache import cache_folder


class OneStage(Cell):
    """A cell of which one stage alone is traced."""

    stage: int

    @classmethod
    def of(cls, cell: Cell, stage: int) -> OneStage:
        """That stage of a cell."""
        return cls.model_construct(**{**dict(cell), "stage": stage})

    @property
    def cell(self) -> Cell:
        """The cell alone."""
        return Cell.model_construct(**{name: getattr(self, name) for name in Cell.model_fields})


def stages_beside(cells: Sequence[Cell], jobs: int) -> list[OneStage]:
    """The stages that are worth tracing beside the cells themselves; none where workers have enough to do, or
    nothing is kept.

    From the last one back every second one: who examines a cell begins with the first, and goes on with the
    second last. Of the stages between, which differ in their micro-batches alone, two are traced; so no more
    are taken here, unless each differs.
    """
    if len(cells) >= jobs or cache_folder() is None:
        return []
    return [
        OneStage.of(cell, stage)
        for cell in cells
        for stage in range(cell.sizes.pp - 1, 0, -2)[: None if cell.training.schedule == "interleaved" else 2]
    ]
