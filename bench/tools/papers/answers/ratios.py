"""Ratios: how much more of a quantity some cells have than one of them, where nothing was published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.tools.papers.answer import Answer, Mistake, OurNumber, ScenarioResults, unknown_quantity
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.selector import Selector


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
        yield from unknown_quantity("quantity", self.quantity)
        if not self.cells.select(declared):
            yield ["cells"], f"no group declares a cell with {self.cells}"
        for message in self.baseline.unclear(declared):
            yield ["baseline"], message

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        below = results.measured(self.baseline, self.quantity)
        cells = self.cells.select(results.cells)
        ratios = [self._ratio(results.measured_at(cell, self.quantity), below, cell) for cell in cells]
        yield from sorted(ratios, key=lambda ratio: (ratio.reproduced is None, -(ratio.reproduced or 0.0)))

    def _ratio(self, ours: OurNumber, below: OurNumber, cell: Cell) -> Comparison:
        count = cell.training.micro_batches
        parts = f", {count} micro-batches" if count > 1 else ""
        return Comparison.of(
            f"{self.ratio}: {cell.strategy} {cell.mesh_text}{parts}",
            [cell, below.cell],
            None,
            ours.value / below.value if ours.value is not None and below.value else None,
            role="predicted",
            notes=[f"baseline {below.missing}" if below.missing else ours.missing],
            variant=cell.variant,
            quantity="ratio",
        )
