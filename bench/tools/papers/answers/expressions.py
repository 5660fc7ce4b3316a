"""Values: arithmetic on a quantity of some cells, such as a ratio, beside a published number or alone::

values:
  - claim: rsa-max-batch-base
    published: {file: rsa_claims.csv}           # the row that has the claim's name
    cells:                                      # by a name, which the expression may hold
      numerator: {strategy: ring_self_attention, world: 64}
      denominator: {strategy: tensor_parallel, world: 12}
    ours: numerator / denominator               # may be left out where there is one cell
    quantity: answer                            # of each cell, a field of a measurement
  - claim: longest
    each: {model: bert-large}                   # a value for each of these cells, the largest first
    cells: {baseline: {model: bert-large, strategy: single}}
    ours: each / baseline
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import PositiveFloat

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.published_number import PublishedNumber
from spbench.bench.tools.papers.answer import (
    Answer,
    Mistake,
    ScenarioResults,
    unknown_quantity,
)
from spbench.bench.tools.papers.answers.formulas import evaluate
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.selector import Selector
from spbench.bench.tools.papers.sources import PublishedPlace

#: the name of the cell, of several, whose value an expression is
EACH = "each"


class Value(Answer):
    """An expression, and the published number that is set beside it.

    Attributes:
        published: its row is the one that has the claim's name; None: nothing was published.
        ours: what :func:`evaluate` takes, on the names of the cells.
        unit: of the published number, in the quantity's own.
    """

    name = "values"

    claim: str
    published: PublishedPlace | None = None
    cells: dict[str, Selector] = {}
    each: Selector | None = None
    ours: str = ""
    quantity: str = "answer"
    unit: PositiveFloat = 1.0
    note: str = ""

    @property
    def expression(self) -> str:
        """``ours``, or the name of the only cell."""
        return self.ours or next(iter(self.cells), EACH)

    @property
    def names(self) -> list[str]:
        """The names in the expression, in its order."""
        return list(dict.fromkeys(re.findall(r"\b[A-Za-z_]\w*", self.expression)))

    @property
    def is_ratio(self) -> bool:
        """Whether it is the ratio of two cells' quantities."""
        return self.expression.replace(" ", "") == "/".join(self.names) and len(self.names) == 2

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        quantity = "ratio" if self.is_ratio else self.quantity
        return [self.published.number(self.claim, quantity, folder)] if self.published else []

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        selectors = [*self.cells.values(), *([self.each] if self.each else [])]
        return [cell for selector in selectors for cell in selector.select(declared)]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        yield from unknown_quantity("quantity", self.quantity)
        for name, selector in self.cells.items():
            for message in selector.unclear(declared):
                yield ["cells", name], message
        if self.each is not None and not self.each.select(declared):
            yield [EACH], f"no group declares a cell with {self.each}"
        names = [*self.cells, *([EACH] if self.each else [])]
        if not self.names:
            yield ["ours"], f"{self.ours!r} has no name of a cell"
        try:  # differences of these are not zero, so that they may be divided by
            evaluate(self.expression, {name: 2.5**at for at, name in enumerate(names)})
        except UserError as error:
            yield ["ours"], str(error)
        yield from self.unreadable(folder)

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        if self.each is None:
            yield self._compared(None, results, self.claim)
            return
        values = []
        for cell in self.each.select(results.cells):
            count = cell.training.micro_batches
            parts = f", {count} micro-batches" if count > 1 else ""
            label = f"{self.claim}: {cell.strategy} {cell.mesh_text}{parts}"
            values.append(self._compared(cell, results, label))
        yield from sorted(values, key=lambda value: (value.reproduced is None, -(value.reproduced or 0.0)))

    def _compared(self, each: Cell | None, results: ScenarioResults, label: str) -> Comparison:
        ours = {
            name: results.measured_at(each, self.quantity)
            if name == EACH and each
            else results.measured(self.cells[name], self.quantity)
            for name in self.names
        }
        missing = [
            our.missing if name == EACH else f"{name if len(ours) > 1 else 'cell'} {our.missing}"
            for name, our in ours.items()
            if our.missing
        ]
        value = None
        if not missing:
            try:
                value = evaluate(self.expression, {name: our.value for name, our in ours.items()}) / self.unit
            except UserError as error:
                missing = [str(error)]
        cells = [our.cell for our in ours.values()]
        search = cells[0].search if cells[0] else None
        quantity = f"max_{search.quantity}" if search and self.quantity == "answer" else self.quantity
        numbers = self.numbers(results.folder)
        known = [cell for cell in cells if cell]
        return Comparison.of(
            label,
            cells if self.is_ratio else cells[:1],
            numbers[0].value if numbers else None,
            value,
            role=results.role(self.claim, numbers[0], self.quantity, known) if numbers else "predicted",
            notes=[self.note, *missing],
            variant=results.variant,
            quantity="ratio" if self.is_ratio else quantity,
            source=numbers[0].source if numbers else "",
        )
