"""Sums: a published number beside the weighted sum of a quantity of several cells, as what a layer adds to a
step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field, PositiveFloat

from spbench.bench.cell import Cell
from spbench.bench.published_number import PublishedNumber
from spbench.bench.tools.papers.answer import Answer, Mistake, ScenarioResults, unknown_quantity
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.files import PublishedPlace
from spbench.bench.tools.papers.selector import Selector
from spbench.bench.yaml_files import StrictModel


class Term(StrictModel):
    """A cell, and what its quantity is multiplied by."""

    factor: float
    cell: Selector


class Sum(Answer):
    """A published number and the sum that is set beside it.

    Attributes:
        published: its row is the one that has the sum's name.
        quantity: a field of a measurement.
        unit: of the published number, in the quantity's own.
    """

    name = "sums"
    naming_field = "sum"

    sum: str
    published: PublishedPlace
    terms: list[Term] = Field(min_length=1)
    quantity: str = "step_time_s"
    unit: PositiveFloat = 1.0
    note: str = ""

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        return [self.published.number(self.sum, self.quantity, folder)]

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        return [cell for term in self.terms for cell in term.cell.select(declared)]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        yield from unknown_quantity("quantity", self.quantity)
        for place, term in enumerate(self.terms):
            for message in term.cell.unclear(declared):
                yield ["terms", place, "cell"], message
        yield from self.unreadable(folder)

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        (published,) = self.numbers(results.folder)
        ours = [results.measured(term.cell, self.quantity) for term in self.terms]
        missing = [f"term {place} {our.missing}" for place, our in enumerate(ours, start=1) if our.missing]
        terms = zip(self.terms, ours, strict=True)
        total = None if missing else sum(term.factor * our.value for term, our in terms) / self.unit
        cells = [our.cell for our in ours]
        yield Comparison.of(
            self.sum,
            cells[:1],
            published.value,
            total,
            role=results.role(self.sum, published, self.quantity, [cell for cell in cells if cell]),
            notes=[self.note, *missing],
            variant=results.variant,
            quantity=self.quantity,
            source=published.source,
        )
