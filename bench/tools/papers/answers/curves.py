"""Loss curves: how far a training run's losses are from another's at the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat

from spbench.bench.cell import Cell
from spbench.bench.tools.papers.answer import Answer, ScenarioResults
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.selector import Mistake, Selector

Losses = Sequence[Mapping[str, float | None]]

#: number of last steps whose mean is the final loss: one batch's loss says little
LAST_STEPS = 20


class CurveClaim(Answer):
    """A claim that a cell's training run has the losses of another's, shown by curves that coincide.

    For each loss, two numbers are compared: the largest relative deviation from the reference's over all
    steps, and the final loss, the mean of the last steps. ``bound``: a larger deviation is not rounding.
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
        learning = replace(results, cells=_learning(results.cells))
        sides = {side: learning.measured(selector, "losses") for side, selector in self.sides().items()}
        missing = [f"{side} {run.missing}" for side, run in sides.items() if run.missing]
        ours, theirs = (run.value or [] for run in sides.values())
        if not missing and [at["step"] for at in ours] != [at["step"] for at in theirs]:
            missing = ["the two have other steps"]

        def entry(quantity: str, loss: str, value: float | None, note: str, status: str = "") -> Comparison:
            return Comparison.of(
                f"{self.claim}: {quantity.replace('_', ' ')}, {loss}".rstrip(", "),
                [run.cell for run in sides.values()],
                None,
                value,
                role="curve",
                notes=[self.note, note],
                variant=results.variant,
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

    def deviation(a: Any, b: Any) -> float:
        return 0.0 if a == b else abs(a - b) / abs(b) if b else float("inf")

    return [deviation(here[loss], there[loss]) for here, there in zip(ours, theirs, strict=True)]


def final(losses: Losses, loss: str) -> float:
    """The mean of the last steps."""
    last = [value for at in losses[-LAST_STEPS:] if (value := at[loss]) is not None]
    return sum(last) / len(last)


def _learning(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.learning is not None]
