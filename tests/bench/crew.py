"""Workers in this process."""

from __future__ import annotations

from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.engine import Run, measure, run_cell
from spbench.bench.measurement import Outcome


class CrewHere:
    """In place of :class:`Crew`: gives a cell its outcome when that is asked for."""

    def __init__(self, run: Run = run_cell):
        self.run = run
        self.given: list[tuple[Cell, Run]] = []

    @property
    def busy(self) -> bool:
        return bool(self.given)

    def idle(self, at_most: int) -> Any:
        return None if self.given else self

    def give(self, cell: Cell, run: Run) -> None:
        self.given.append((cell, run))

    def ended(self) -> list[tuple[Cell, Outcome]]:
        cell, run = self.given.pop()
        return [(cell, measure(run, cell))]

    def dismiss(self) -> None:
        self.given.clear()
