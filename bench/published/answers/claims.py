"""Claims: a published number beside a quantity of one cell, or beside the ratio of two cells' quantities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, suggestion
from spbench.bench.published.answer import QUANTITIES, Answer, Mistake
from spbench.bench.published.compared import Comparison, ScenarioResults, relative_error
from spbench.bench.published.published import PublishedPlace
from spbench.bench.published.selector import Selector
from spbench.bench.published_number import PublishedNumber
from spbench.bench.sweep.results import Row


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
        if self.quantity not in QUANTITIES:
            yield ["quantity"], f"unknown quantity {self.quantity!r}{suggestion(self.quantity, QUANTITIES)}"
        for side, selector in self.sides().items():
            for message in selector.unclear(declared):
                yield [side], message
        try:
            self.numbers(folder)
        except UserError as error:
            yield ["published"], str(error)

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        (published,) = self.numbers(results.folder)
        found = {
            side: number_of(selector.select(results.cells), selector, self.quantity, results.rows)
            for side, selector in self.sides().items()
        }
        cells = [cell for cell, _, _ in found.values() if cell is not None]
        missing = [
            f"{side if len(found) > 1 else 'cell'} {why}" for side, (_, _, why) in found.items() if why
        ]
        reproduced = None
        if not missing:
            values = [value for _, value, _ in found.values() if value is not None]
            if len(values) == 2 and not values[1]:
                missing = ["denominator is zero"]
            else:
                reproduced = values[0] / values[1] if len(values) == 2 else float(values[0])
        keys = {side: cell.key if cell else "" for side, (cell, _, _) in found.items()}
        numerator = found["numerator"][0]
        yield Comparison(
            claim=self.claim,
            published=published.value,
            reproduced=reproduced,
            relative_error=relative_error(published.value, reproduced),
            role=results.role(self.claim, published, self.quantity, cells),
            note="; ".join([self.note] * bool(self.note) + missing),
            variant=results.cells[0].variant,
            numerator=keys["numerator"],
            denominator=keys.get("denominator", ""),
            cell=" / ".join(filter(None, keys.values())),
            strategy=numerator.strategy if numerator else "",
            quantity="ratio" if len(found) == 2 else _searched(self.quantity, numerator),
            source=published.source,
        )


def _searched(quantity: str, cell: Cell | None) -> str:
    """The quantity, and of a search's answer what was searched for: max_batch or max_seq_len."""
    search = cell.search if cell is not None else None
    return f"max_{search.quantity}" if search is not None and quantity == "answer" else quantity


def number_of(
    selected: Sequence[Cell], selector: Selector, quantity: str, rows: Mapping[str, Row]
) -> tuple[Cell | None, float | None, str]:
    """(the one cell that was selected, its number, why there is none); None, and "" for the reason, where
    there is no such thing.

    Args:
        selector: what selected the cells, for the reason.
        quantity: a field of a measurement.
    """
    if len(selected) != 1:
        return None, None, f"is {len(selected) or 'no'} cells ({selector})"
    (cell,) = selected
    if cell.key not in rows:
        return cell, None, "was not run"
    row = rows[cell.key]
    value = row["measurement"].get(quantity)
    if value is None or row["status"] not in ("ok", "oom"):
        reason = f": {row['reason']}" if row["reason"] else ""
        return cell, None, f"has no {quantity}, {row['status']}{reason}"
    return cell, value, ""
