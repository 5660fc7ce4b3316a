"""Comparison: what was published beside what we find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spbench.bench.atomic_write import write_whole
from spbench.bench.cell import Cell
from spbench.bench.comparison.curves import findings
from spbench.bench.comparison.formulas import evaluate, letters, sent_bytes, sent_elements
from spbench.bench.comparison.tables import UNSTATED, PublishedRow, Table, rows_of
from spbench.bench.config.scenario import Claim, FormulaClaim, Scenario, Selector
from spbench.bench.sweep.results import Row

if TYPE_CHECKING:
    from pandas import DataFrame

FILE = "comparison.csv"


@dataclass(frozen=True)
class Comparison:
    """One claim, or one number of a published table, in one variant.

    Attributes:
        published: None where a published table has a status and no number.
        reproduced: our number, or None where there is none; the note says why.
        relative_error: reproduced / published - 1.
        numerator, denominator: the keys of the cells that it comes from.
        table: the published table that it belongs to; "" for a claim.
        cell: the cell's key; of a ratio both, with " / " between them.
        quantity: what is compared: a column of the published table, ratio, max_batch, ...
        status_published, status_reproduced: ok, oom or unstated, and ours; "" where there is none.
    """

    claim: str
    published: float | None
    reproduced: float | None
    relative_error: float | None
    role: str
    note: str
    variant: str
    numerator: str
    denominator: str
    table: str = ""
    cell: str = ""
    strategy: str = ""
    quantity: str = ""
    status_published: str = ""
    status_reproduced: str = ""


def number_or_status(number: float | None, status: str) -> str | None:
    """A number as text of six digits, or its status where there is none; both where a run that is not ok has
    a number. None: neither is known."""
    if number is None:
        return status or None
    text = f"{number:.6g}"
    return text if status in ("", "ok") else f"{status} ({text})"


def compare(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """Evaluate what a scenario answers to: its claims in each variant, cluster and engine among ``cells``,
    its formulas, and its published tables.

    Args:
        cells: the declared cells (on other clusters and engines, if those were asked for).
        rows: the results by key; a claim whose cells are not there, or have no such number, stays.
    """
    return [
        *_claims(scenario, cells, rows),
        *_formulas(scenario, cells, rows),
        *_tables(scenario, cells, rows),
        *_curves(scenario, cells, rows),
    ]


def _tables(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """Each quantity of each row of the published tables, beside each cell that the row speaks of."""
    return [
        _entry(table, published, quantity, cell, rows.get(cell.key))
        for variant in dict.fromkeys(cell.variant for cell in cells)
        for table in scenario.document.tables
        for quantity in table.quantities
        for published in rows_of(table, scenario.path.parent)
        for cell in cells
        if cell.variant == variant and table.matches(published, cell)
        if published.number(quantity) is not None or _status(table, published) != "ok"
    ]


def _status(table: Table, published: PublishedRow) -> str:
    return published.text[table.status] if table.status is not None else "ok"


def _entry(table: Table, published: PublishedRow, quantity: str, cell: Cell, row: Row | None) -> Comparison:
    """One number of a published table, or the status of a run that has none."""
    theirs = published.number(quantity)
    status = _status(table, published)
    ours, notes = None, [*filter(None, (table.settings(published), table.note))]
    if row is None:
        notes.append("was not run")
    else:
        found = row["measurement"].get(table.quantities[quantity].field)
        ours = None if found is None else found / table.quantities[quantity].unit
        reason = f": {row['reason']}" if row["reason"] else ""
        if status == UNSTATED:
            notes += [f"{row['status']}{reason}"] * (row["status"] != "ok")
        elif row["status"] != status:
            notes.append(f"published {status}, ours {row['status']}{reason}")
        elif ours is None and theirs is not None:
            notes.append(f"has no {table.quantities[quantity].field}")
    return Comparison(
        claim=table.label(published, quantity),
        published=theirs,
        reproduced=ours,
        relative_error=ours / theirs - 1 if ours is not None and theirs else None,
        role=table.role(published, quantity),
        note="; ".join(notes),
        variant=cell.variant,
        numerator=cell.key,
        denominator="",
        table=table.table,
        cell=cell.key,
        strategy=cell.strategy,
        quantity=quantity,
        status_published=status,
        status_reproduced="" if row is None else row["status"],
    )


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
            claim = f"closed form of {cell.strategy}, bytes"
            found.append(_beside(claim, "sent_bytes", expected, metered, cell))
    return found


def _formula(claim: FormulaClaim, formula: str, cell: Cell, rows: Mapping[str, Row]) -> Comparison:
    other = cell.model_copy(update={"model_options": {**cell.model_options, **claim.less}})
    missing = [c.key for c in (cell, other) if rows.get(c.key, {}).get("status") not in ("ok", "oom")]
    metered = None
    if not missing:
        whole, rest = (sent_elements(c, rows[c.key], claim.phases) for c in (cell, other))
        metered = whole - rest
    entry = _beside(claim.claim, "sent_elements", evaluate(formula, letters(cell)), metered, cell)
    return replace(entry, note=f"no measurement of {' and '.join(missing)}") if missing else entry


def _beside(claim: str, quantity: str, published: float, reproduced: float | None, cell: Cell) -> Comparison:
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
        cell=cell.key,
        strategy=cell.strategy,
        quantity=quantity,
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
        cell=" / ".join(key for key, _, _ in found if key),
        strategy=next((cell.strategy for cell in cells if cell.key == found[0][0]), ""),
        quantity="ratio" if len(found) == 2 else _searched(claim.quantity, found[0][0], cells),
    )


def _searched(quantity: str, key: str, cells: Sequence[Cell]) -> str:
    """The quantity, and of a search's answer what was searched for: max_batch or max_seq_len."""
    search = next((cell.search for cell in cells if cell.key == key), None)
    return f"max_{search.quantity}" if search is not None and quantity == "answer" else quantity


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


def _curves(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """Of each curve claim and each loss, the largest deviation and the final loss."""
    settings = dict.fromkeys((cell.variant, cell.cluster, cell.engine) for cell in cells)
    return [
        Comparison(
            claim=f"{found.claim}: {found.quantity.replace('_', ' ')}, {found.loss}".rstrip(", "),
            published=None,
            reproduced=found.value,
            relative_error=None,
            role="curve",
            note="; ".join(filter(None, (claim.note, found.note))),
            variant=setting[0],
            numerator=found.cell.key if found.cell else "",
            denominator=found.reference.key if found.reference else "",
            cell=" / ".join(cell.key for cell in (found.cell, found.reference) if cell),
            strategy=found.cell.strategy if found.cell else "",
            quantity=found.quantity,
            status_reproduced="numerics" if found.exceeded else "",
        )
        for setting in settings
        for claim in scenario.document.curves
        for found in findings(claim, [c for c in cells if (c.variant, c.cluster, c.engine) == setting], rows)
    ]


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
    return write_csv(as_frame(comparisons), folder / FILE)


def write_csv(table: DataFrame, path: Path) -> Path:
    """Write a table as a CSV file, without its index, whole or not at all; returns the path.

    Raises:
        UserError: it cannot be written; an earlier one is unchanged.
    """
    return write_whole(path, table.to_csv(index=False, lineterminator="\n"))
