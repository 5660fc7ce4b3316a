"""Comparison: what was published beside what we find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cell import Cell
from bench.declaration import UserError
from bench.formula import evaluate, letters, sent_bytes, sent_elements
from bench.results import Row
from bench.scenario import Claim, FormulaClaim, Scenario, Selector

if TYPE_CHECKING:
    from pandas import DataFrame

FILE = "comparison.csv"


@dataclass(frozen=True)
class Comparison:
    """One claim in one variant.

    Attributes:
        reproduced: our number, or None where there is none; the note says why.
        relative_error: reproduced / published - 1.
        numerator, denominator: the keys of the cells that it comes from.
    """

    claim: str
    published: float
    reproduced: float | None
    relative_error: float | None
    role: str
    note: str
    variant: str
    numerator: str
    denominator: str


def compare(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """Evaluate a scenario's claims: a row for each claim, variant, cluster and engine among ``cells``.

    Args:
        cells: the declared cells (on other clusters and engines, if those were asked for).
        rows: the results by key; a claim whose cells are not there, or have no such number, stays.
    """
    return [*_claims(scenario, cells, rows), *_formulas(scenario, cells, rows)]


def _claims(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    settings = dict.fromkeys((cell.variant, cell.cluster, cell.engine) for cell in cells)
    return [
        _evaluate(scenario, claim, [c for c in cells if (c.variant, c.cluster, c.engine) == setting], rows)
        for setting in settings
        for claim in scenario.document.claims
    ]


def _formulas(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """Each published formula beside each cell that it speaks of, and, for a scenario that has any, each
    cell's closed form beside its metered bytes."""
    if not scenario.document.formulas:
        return []
    found = [
        _formula(claim, scenario.formula(claim), cell, rows)
        for claim in scenario.document.formulas
        for cell in cells
        if claim.cells.matches(cell)
    ]
    for cell in cells:
        row = rows.get(cell.key)
        if row is not None and row["status"] in ("ok", "oom"):
            expected, metered = sent_bytes(row, "formula"), sent_bytes(row, "communication")
            found.append(_beside(f"closed form of {cell.strategy}, bytes", expected, metered, cell))
    return found


def _formula(claim: FormulaClaim, formula: str, cell: Cell, rows: Mapping[str, Row]) -> Comparison:
    other = cell.model_copy(update={"model_options": {**cell.model_options, **claim.less}})
    missing = [c.key for c in (cell, other) if rows.get(c.key, {}).get("status") not in ("ok", "oom")]
    metered = None
    if not missing:
        whole, rest = (sent_elements(c, rows[c.key], claim.phases) for c in (cell, other))
        metered = whole - rest
    entry = _beside(claim.claim, evaluate(formula, letters(cell)), metered, cell)
    return replace(entry, note=f"no measurement of {' and '.join(missing)}") if missing else entry


def _beside(claim: str, published: float, reproduced: float | None, cell: Cell) -> Comparison:
    return Comparison(
        claim=f"{claim}, {cell.sizes.world} GPUs, {cell.engine}",
        published=published,
        reproduced=reproduced,
        relative_error=reproduced / published - 1 if reproduced is not None and published else None,
        role="formula",
        note="",
        variant=cell.variant,
        numerator=cell.key,
        denominator="",
    )


def _evaluate(scenario: Scenario, claim: Claim, cells: Sequence[Cell], rows: Mapping[str, Row]) -> Comparison:
    published = scenario.published(claim)
    selectors = [s for s in (claim.numerator, claim.denominator) if s is not None]
    found = [_number(selector, claim.quantity, cells, rows) for selector in selectors]
    sides = ("numerator", "denominator") if len(found) == 2 else ("cell",)
    missing = [f"{side} {why}" for side, (_, _, why) in zip(sides, found, strict=True) if why]
    reproduced = None
    if not missing:
        values = [value for _, value, _ in found if value is not None]
        if len(values) == 2 and not values[1]:
            missing = ["denominator is zero"]
        else:
            reproduced = values[0] / values[1] if len(values) == 2 else float(values[0])
    return Comparison(
        claim=claim.claim,
        published=published,
        reproduced=reproduced,
        relative_error=reproduced / published - 1 if reproduced is not None and published else None,
        role=claim.role,
        note="; ".join([claim.note] * bool(claim.note) + missing),
        variant=cells[0].variant,
        numerator=found[0][0],
        denominator=found[1][0] if len(found) == 2 else "",
    )


def _number(
    selector: Selector, quantity: str, cells: Sequence[Cell], rows: Mapping[str, Row]
) -> tuple[str, float | None, str]:
    """(key of the cell, its number, why there is none)."""
    selected = [cell for cell in cells if selector.matches(cell)]
    if len(selected) != 1:
        return "", None, f"is {len(selected) or 'no'} cells ({selector})"
    key = selected[0].key
    if key not in rows:
        return key, None, "was not run"
    row = rows[key]
    value = row["measurement"].get(quantity)
    if value is None or row["status"] not in ("ok", "oom"):
        reason = f": {row['reason']}" if row["reason"] else ""
        return key, None, f"has no {quantity}, {row['status']}{reason}"
    return key, value, ""


def as_frame(comparisons: Sequence[Comparison]) -> DataFrame:
    """The comparison as a table; missing numbers are NaN."""
    from pandas import DataFrame

    columns = [field.name for field in fields(Comparison)]
    frame = DataFrame([asdict(c) for c in comparisons], columns=columns)
    numbers = ["published", "reproduced", "relative_error"]
    return frame.astype(dict.fromkeys(numbers, float))


def write(comparisons: Sequence[Comparison], folder: Path) -> Path:
    """Write comparison.csv and return its path.

    Raises:
        UserError: it cannot be written; an earlier one is as it was.
    """
    path, unfinished = folder / FILE, folder / f".{FILE}.tmp"
    try:
        as_frame(comparisons).to_csv(unfinished, index=False)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path
