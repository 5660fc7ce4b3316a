"""Workers in this process."""

from __future__ import annotations

from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.run_cell import Run, measure
from spbench.bench.measurement import Outcome


class CrewHere:
    """In place of :class:`Crew`: gives a cell its outcome when that is asked for."""

    def __init__(self, run: Run):
        self.run = run
        self.given: list[Cell] = []

    @property
    def busy(self) -> bool:
        return bool(self.given)

    def idle(self, at_most: int) -> Any:
        return None if self.given else self

    def give(self, cell: Cell) -> None:
        self.given.append(cell)

    def ended(self) -> list[tuple[Cell, Outcome]]:
        cell = self.given.pop()
        return [(cell, measure(self.run, cell))]

    def dismiss(self) -> None:
        self.given.clear()
