"""Ratios: how much more of a quantity some cells have than one of them, where nothing was published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.errors import suggestion
from spbench.bench.published.answer import QUANTITIES, Answer, Mistake
from spbench.bench.published.answers.claims import number_of
from spbench.bench.published.compared import Comparison, ScenarioResults
from spbench.bench.published.selector import Selector


def _split(cell: Cell) -> str:
    count = cell.training.micro_batches
    parts = f", {count} micro-batches" if count > 1 else ""
    return f"{cell.strategy} {cell.mesh_text}{parts}"


class Ratios(Answer):
    """The quantity of each of some cells over that of one cell, the largest ratio first.

    Attributes:
        cells: the numerators.
        baseline: the denominator.
        quantity: a field of a measurement.
    """

    name = "ratios"
    naming_field = "ratio"

    ratio: str
    cells: Selector
    baseline: Selector
    quantity: str = "answer"

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        return [*self.cells.select(declared), *self.baseline.select(declared)]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        if self.quantity not in QUANTITIES:
            yield ["quantity"], f"unknown quantity {self.quantity!r}{suggestion(self.quantity, QUANTITIES)}"
        if not self.cells.select(declared):
            yield ["cells"], f"no group declares a cell with {self.cells}"
        for message in self.baseline.unclear(declared):
            yield ["baseline"], message

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        baseline, below, missing = number_of(
            self.baseline.select(results.cells), self.baseline, self.quantity, results.rows
        )
        entries = [
            self._entry(cell, baseline, below, f"baseline {missing}" if missing else "", results)
            for cell in self.cells.select(results.cells)
        ]
        yield from sorted(entries, key=lambda e: (e.reproduced is None, -(e.reproduced or 0.0)))

    def _entry(
        self, cell: Cell, baseline: Cell | None, below: float | None, missing: str, results: ScenarioResults
    ) -> Comparison:
        _, value, why = number_of([cell], self.cells, self.quantity, results.rows)
        keys = [cell.key, baseline.key if baseline is not None else ""]
        return Comparison(
            claim=f"{self.ratio}: {_split(cell)}",
            published=None,
            reproduced=value / below if value is not None and below else None,
            relative_error=None,
            role="predicted",
            note=missing or why,
            variant=cell.variant,
            numerator=keys[0],
            denominator=keys[1],
            cell=" / ".join(filter(None, keys)),
            strategy=cell.strategy,
            quantity="ratio",
        )
