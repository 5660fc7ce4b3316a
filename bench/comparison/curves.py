"""Loss curves: how far a training run's losses are from another's at the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spbench.bench.cell import Cell
from spbench.bench.config.scenario import CurveClaim, Selector
from spbench.bench.sweep.results import Row

Losses = Sequence[Mapping[str, float | None]]

#: number of last steps whose mean is the final loss: one batch's loss says little
LAST_STEPS = 20


@dataclass(frozen=True)
class CurveFinding:
    """One number of a curve claim.

    Attributes:
        quantity: largest_deviation (relative, over all steps) or final_loss (mean of the last steps).
        loss: its name.
        value: None where there is none; the note says why.
        exceeded: a deviation above the claim's bound.
        cell, reference: the cells compared, as far as there is one.
    """

    claim: str
    quantity: str
    loss: str
    value: float | None
    note: str
    exceeded: bool
    cell: Cell | None
    reference: Cell | None


def findings(claim: CurveClaim, cells: Sequence[Cell], rows: Mapping[str, Row]) -> Iterator[CurveFinding]:
    """The largest deviation and the final loss of each loss, among cells of one variant and engine."""
    sides = [_curves(side, selector, cells, rows) for side, selector in claim.sides().items()]
    (cell, ours, _), (reference, theirs, _) = sides
    missing = [why for _, _, why in sides if why]
    if not missing and [at["step"] for at in ours] != [at["step"] for at in theirs]:
        missing = ["the two have other steps"]
    if missing:
        note = "; ".join(missing)
        yield CurveFinding(claim.claim, "largest_deviation", "", None, note, False, cell, reference)
        return
    for loss in (name for name in theirs[0] if name != "step"):
        gaps = deviations(ours, theirs, loss)
        largest = max(gaps)
        note = f"at step {ours[gaps.index(largest)]['step']}; {gaps[0]:.1e} at step {ours[0]['step']}"
        exceeded = largest > claim.bound
        if exceeded:
            note += f"; above its bound {claim.bound:g}"
        yield CurveFinding(claim.claim, "largest_deviation", loss, largest, note, exceeded, cell, reference)
        note = f"mean of the last {min(LAST_STEPS, len(ours))} steps; reference {final(theirs, loss):.6g}"
        yield CurveFinding(claim.claim, "final_loss", loss, final(ours, loss), note, False, cell, reference)


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


def _curves(
    side: str, selector: Selector, cells: Sequence[Cell], rows: Mapping[str, Row]
) -> tuple[Cell | None, Losses, str]:
    """(the cell, its losses, why there are none)."""
    selected = [cell for cell in cells if cell.learning is not None and selector.matches(cell)]
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
