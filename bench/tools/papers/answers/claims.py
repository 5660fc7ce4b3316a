"""Claims: a published number beside a quantity of one cell, or beside the ratio of two cells' quantities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.published_number import PublishedNumber
from spbench.bench.tools.papers.answer import Answer, Mistake, ScenarioResults, unknown_quantity
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.files import PublishedPlace
from spbench.bench.tools.papers.selector import Selector


class Claim(Answer):
    """A published number and what of ours is set beside it.

    Attributes:
        published: its row is the one that has the claim's name.
        denominator: if given, the ratio of the two cells' quantities is compared.
        quantity: a field of a measurement.
    """

    name = "claims"

    claim: str
    published: PublishedPlace
    numerator: Selector
    denominator: Selector | None = None
    quantity: str = "answer"
    note: str = ""

    def sides(self) -> dict[str, Selector]:
        """The one or two cells, by their keys in the file."""
        sides = {"numerator": self.numerator}
        return sides if self.denominator is None else sides | {"denominator": self.denominator}

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        quantity = self.quantity if self.denominator is None else "ratio"
        return [self.published.number(self.claim, quantity, folder)]

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        return [cell for selector in self.sides().values() for cell in selector.select(declared)]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        yield from unknown_quantity("quantity", self.quantity)
        for side, selector in self.sides().items():
            for message in selector.unclear(declared):
                yield [side], message
        yield from self.unreadable(folder)

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        (published,) = self.numbers(results.folder)
        ours = {side: results.measured(selector, self.quantity) for side, selector in self.sides().items()}
        is_ratio = len(ours) == 2
        missing = [
            f"{side if is_ratio else 'cell'} {our.missing}" for side, our in ours.items() if our.missing
        ]
        if is_ratio and not missing and not ours["denominator"].value:
            missing = ["denominator is zero"]
        value, *below = [our.value for our in ours.values()]
        cells = [our.cell for our in ours.values()]
        search = cells[0].search if cells[0] else None
        quantity = f"max_{search.quantity}" if search and self.quantity == "answer" else self.quantity
        yield Comparison.of(
            self.claim,
            cells,
            published.value,
            None if missing else float(value) / (below[0] if below else 1),
            role=results.role(self.claim, published, self.quantity, [cell for cell in cells if cell]),
            notes=[self.note, *missing],
            variant=results.variant,
            quantity="ratio" if is_ratio else quantity,
            source=published.source,
        )
