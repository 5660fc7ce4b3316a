"""Loss curves: how far a training run's losses are from another's at the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import PositiveFloat

from spbench.bench.cell import Cell
from spbench.bench.published.answer import Answer, Mistake
from spbench.bench.published.compared import Comparison, ScenarioResults
from spbench.bench.published.selector import Selector
from spbench.bench.sweep.results import Row

Losses = Sequence[Mapping[str, float | None]]

#: number of last steps whose mean is the final loss: one batch's loss says little
LAST_STEPS = 20


class CurveClaim(Answer):
    """That a cell's training run has the losses of another's, which a paper shows by curves that coincide.

    Compared are, of each loss, the largest relative deviation from the reference's over all steps, and the
    final loss, the mean of the last steps.

    Attributes:
        bound: a larger deviation is not rounding.
    """

    name = "curves"

    claim: str
    cell: Selector
    reference: Selector
    bound: PositiveFloat
    note: str = ""

    def sides(self) -> dict[str, Selector]:
        """The two cells, by their keys in the file."""
        return {"cell": self.cell, "reference": self.reference}

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        return [cell for selector in self.sides().values() for cell in selector.select(_learning(declared))]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        for side, selector in self.sides().items():
            for message in selector.unclear(_learning(declared)):
                yield [side], message

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        sides = [_curves(side, s, results.cells, results.rows) for side, s in self.sides().items()]
        (cell, ours, _), (reference, theirs, _) = sides
        missing = [why for _, _, why in sides if why]
        if not missing and [at["step"] for at in ours] != [at["step"] for at in theirs]:
            missing = ["the two have other steps"]

        def entry(quantity: str, loss: str, value: float | None, note: str, status: str = "") -> Comparison:
            return Comparison(
                claim=f"{self.claim}: {quantity.replace('_', ' ')}, {loss}".rstrip(", "),
                published=None,
                reproduced=value,
                relative_error=None,
                role="curve",
                note="; ".join(filter(None, (self.note, note))),
                variant=results.cells[0].variant,
                numerator=cell.key if cell else "",
                denominator=reference.key if reference else "",
                cell=" / ".join(side.key for side in (cell, reference) if side),
                strategy=cell.strategy if cell else "",
                quantity=quantity,
                status_reproduced=status,
            )

        if missing:
            yield entry("largest_deviation", "", None, "; ".join(missing))
            return
        for loss in (name for name in theirs[0] if name != "step"):
            gaps = deviations(ours, theirs, loss)
            largest = max(gaps)
            note = f"at step {ours[gaps.index(largest)]['step']}; {gaps[0]:.1e} at step {ours[0]['step']}"
            exceeded = largest > self.bound
            if exceeded:
                note += f"; above its bound {self.bound:g}"
            yield entry("largest_deviation", loss, largest, note, "numerics" if exceeded else "")
            last = min(LAST_STEPS, len(ours))
            note = f"mean of the last {last} steps; reference {final(theirs, loss):.6g}"
            yield entry("final_loss", loss, final(ours, loss), note)


def deviations(ours: Losses, theirs: Losses, loss: str) -> list[float]:
    """|ours - theirs| / |theirs| of each step."""
    found = []
    for here, there in zip(ours, theirs, strict=True):
        a, b = here[loss], there[loss]
        assert a is not None
        assert b is not None
        found.append(0.0 if a == b else abs(a - b) / abs(b) if b else float("inf"))
    return found


def final(losses: Losses, loss: str) -> float:
    """The mean of the last steps."""
    last = [value for at in losses[-LAST_STEPS:] if (value := at[loss]) is not None]
    return sum(last) / len(last)


def _learning(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.learning is not None]


def _curves(
    side: str, selector: Selector, cells: Sequence[Cell], rows: Mapping[str, Row]
) -> tuple[Cell | None, Losses, str]:
    """(the cell, its losses, why there are none)."""
    selected = selector.select(_learning(cells))
    if len(selected) != 1:
        return None, [], f"{side} is {len(selected) or 'no'} cells ({selector})"
    (cell,) = selected
    if cell.key not in rows:
        return cell, [], f"{side} was not run"
    row = rows[cell.key]
    if row["status"] != "ok" or not row["measurement"].get("losses"):
        reason = f": {row['reason']}" if row["reason"] else ""
        return cell, [], f"{side} has no losses, {row['status']}{reason}"
    return cell, row["measurement"]["losses"], ""
