"""What reproducing a paper found: its records, their errors by role, its tables and its verdict.

A published number that is compared several times, as in variants, is counted once, by its first comparison.

Numbers reproduce, do in part, or do not, by one rule for a table and for a paper. A number is met where ours
is within :data:`TOLERANCE` of it (a formula: equal at every cell), a published out of memory where ours is
too. "Yes" is all met, "no" fewer than half; numbers that a rate was fitted to are not judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from spbench.bench.errors import UserError, suggestion
from spbench.bench.measure import Document
from spbench.bench.tools.papers.answers.tables import UNSTATED
from spbench.bench.tools.papers.comparison import Comparison, Role, number_or_status
from spbench.bench.units import difference, percent, three_digits
from spbench.plots.series import grouped

Line = dict[str, Any]

#: the roles of published numbers, in the order in which they are listed
ROLES: tuple[Role, ...] = ("predicted", "inferred", "calibrated", "formula")
assert set(ROLES) | {"curve"} == set(get_args(Role))


@dataclass(frozen=True)
class PaperFindings:
    """The lines of PAPER.csv and PAPER_runs.csv. ``documents``: the scenario files by scenario, for titles
    and for what is written by hand of a scenario. ``orders``: by scenario, lines of :func:`order_lines`."""

    paper: str
    records: Sequence[Comparison]
    runs: Sequence[Mapping[str, str]]
    documents: Mapping[str, Document] = field(default_factory=dict)
    orders: Mapping[str, list[Line]] = field(default_factory=dict)

    @property
    def scenarios(self) -> list[str]:
        """Their names, in the order of the runs."""
        return [run["scenario"] for run in self.runs]

    def blocks(self, scenario: str) -> Iterator[tuple[str, list[Line]]]:
        """The tables of a scenario: (title, lines), claims first."""
        mine = [r for r in self.records if r.scenario == scenario]
        formulas = [r for r in mine if r.role == "formula"]
        if claims := [r for r in mine if r.role != "formula" and not r.of_table]:
            columns = ("claim", "table"), ("variant", "variant"), ("quantity", "quantity")
            yield (
                "claims",
                [{name: getattr(r, of) for name, of in columns} | compared(r, _digits([r])) for r in claims],
            )
        tables = grouped((r for r in mine if r.of_table), lambda r: (r.table_name, r.quantity, r.variant))
        for (table, quantity, variant), rows in tables.items():
            title = f"{table}, {quantity}" + (f" ({variant})" if variant else "")
            statuses = _statuses(rows)
            title += f": {errors_by_role(rows)}" + (f"; status right in {statuses}" if statuses else "")
            yield title, _table_lines(rows)
        if order := self.orders.get(scenario):
            yield "order of the layouts of a run (Kendall's tau)", order
        if formulas:
            yield "formulas", _formula_lines(formulas)

    def verdict(self) -> list[Line]:
        """A line for each published table and quantity, and for the claims, formulas and curves of a
        scenario; the last line is of all numbers of the paper."""
        lines = []
        for scenario in self.scenarios:
            mine = [r for r in self.records if r.scenario == scenario]
            # ratios of ours alone are no verdict
            answered = [r for r in mine if r.quantity != "ratio" or r.published is not None]
            for (what, variant), rows in by_answer(answered or mine).items():
                lines.append(
                    _verdict_line(scenario, what, variant, rows) | {"statuses right": _statuses(rows)}
                )
        # an error for each cell of a formula, one for any other number
        once = {id(r) for r in distinct(self.records)}
        rows = [r for r in self.records if id(r) in once or r.role == "formula"]
        return [*lines, _verdict_line("all", "", "", rows)]

    def part(self, name: str) -> str:
        """What was found of a scenario, in Markdown; UserError if there is no such scenario."""
        if name not in self.scenarios:
            raise UserError(f"nothing was reproduced under {name!r}{suggestion(name, self.scenarios)}")
        run = next(run for run in self.runs if run["scenario"] == name)
        statuses = ("ok", "oom", "unsupported", "failed")
        counts = ", ".join(f"{run[s]} {s}" for s in statuses if run[s] != "0")
        seconds = int(run["cell_seconds"])
        time = f"{seconds} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        text = [f"{run['cells']} cells ({counts}), {time} of one core in all.\n"]
        text += [f"{title[0].upper()}{title[1:]}\n\n{markdown(lines)}" for title, lines in self.blocks(name)]
        return "\n".join(text)


# -- records and their errors -------------------------------------------------------------------------------


def by_answer(records: Sequence[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """The records by what they answer and the variant: tables by quantity, claims, formulas and curves."""
    return grouped(records, lambda r: (_what(r), r.variant))


def distinct(records: Sequence[Comparison]) -> list[Comparison]:
    """The records of published numbers, each number once: the first of those that have the same source, or
    that are of the same quantity of the same run (and of the same rank, step and measurement of it)."""
    seen: set[object] = set()
    kept = []
    for record in records:
        same: set[object] = {record.source}
        if record.of_table:
            same.add((record.cell, record.quantity, record.label))
        if record.published is not None and not same & seen:
            kept.append(record)
            seen |= same
    return kept


class RoleErrors(NamedTuple):
    """The absolute errors of so many distinct ``numbers`` of one role; None where there is none of ours."""

    role: str
    numbers: int
    median: float | None
    worst: float | None


def role_errors(records: Sequence[Comparison]) -> list[RoleErrors]:
    """The errors of each role that has a published number, in the order of :data:`ROLES`."""
    of_roles = []
    for role in ROLES:
        rows = [r for r in records if r.role == role]
        numbers = distinct(rows)
        # a formula is one number, and is evaluated at many cells
        errors = absolute_errors(rows if role == "formula" else numbers)
        if numbers:
            both = (median(errors), max(errors)) if errors else (None, None)
            of_roles.append(RoleErrors(role, len(numbers), *both))
    return of_roles


def errors_by_role(records: Sequence[Comparison]) -> str:
    """The count of numbers of each role, and the median and the worst of their absolute errors, in words."""
    digits = _digits(records)
    parts = []
    for of in role_errors(records):
        errors = f", median error {percent(of.median, digits)}, worst {percent(of.worst, digits)}"
        parts.append(f"{of.numbers} {of.role}{'' if of.worst is None else errors}")
    gaps = [r.reproduced for r in records if r.quantity == "largest_deviation" and r.reproduced]
    if any(r.role == "curve" for r in records):
        parts.append(f"curves differ by at most {max(gaps):.0e}" if gaps else "curves")
    return "; ".join(parts) or "no published number at hand"


def _statuses(records: Sequence[Comparison]) -> str:
    """How many of the published statuses are ours too, as "3 of 4"; "" where none is published."""
    stated = [r for r in records if r.status_published not in ("", UNSTATED)]
    right = sum(r.status_published == r.status_reproduced for r in stated)
    return f"{right} of {len(stated)}" if stated else ""


# -- lines of tables -----------------------------------------------------------------------------------------


def _what(record: Comparison) -> str:
    """What a line of the verdict is about."""
    if record.of_table:
        return f"{record.table_name}: {record.quantity}"
    return {"formula": "formulas", "curve": "curves"}.get(record.role, "claims")


def _verdict_line(scenario: str, what: str, variant: str, rows: Sequence[Comparison]) -> Line:
    return {
        "scenario": scenario,
        "compared": what,
        "variant": variant,
        "numbers": len(distinct(rows)),
        "errors": errors_by_role(rows),
        "statuses right": "",
    }


def _digits(records: Sequence[Comparison]) -> int:
    """Digits of errors in percent after the point: repeated measurements of real machines tell smaller ones
    apart than papers do."""
    return 2 if any(record.label for record in records if record.of_table) else 1


def _table_lines(records: Sequence[Comparison]) -> list[Line]:
    """A line for each row of a table, with its model if there are several."""
    models = [record.cell.split("/")[0] for record in records]
    return [
        {
            "model": model if len(set(models)) > 1 else "",
            "strategy": record.strategy,
            # sizes, batch and length
            "cell": " ".join(record.cell.split("/")[2:5]),
            "measured": record.label,
            **compared(record, _digits([record])),
        }
        for model, record in zip(models, records, strict=True)
    ]


def compared(record: Comparison, digits: int = 1) -> Line:
    """The published number and ours, with so many digits of the error in percent after the point."""
    digits_of_ours = three_digits if record.is_time else None
    return {
        "published": number_or_status(record.published, record.status_published),
        "ours": number_or_status(record.reproduced, record.status_reproduced, digits_of_ours),
        "relative error": difference(record.relative_error, digits),
        "role": record.role,
        "note": record.note,
    }


def _formula_lines(records: Sequence[Comparison]) -> list[Line]:
    """A line for each formula: how many cells, and the largest error."""
    return [
        {
            "formula": name,
            "engines": ", ".join(sorted({r.cell.split("/")[-2] for r in rows})),
            "cells": len(rows),
            "exactly met": sum(r.relative_error == 0 or r.published == r.reproduced for r in rows),
            "largest error": difference(max((r.relative_error or 0 for r in rows), key=abs)),
        }
        for name, rows in grouped(records, lambda r: r.table.split(",")[0]).items()
    ]


def markdown(lines: Sequence[Line]) -> str:
    """A Markdown table; columns in which nothing stands are left out. "" without lines."""
    if not lines:
        return ""
    columns = [name for name in lines[0] if any(r[name] not in (None, "") for r in lines)]
    rows = [["" if r[c] is None else str(r[c]).replace("|", "\\|") for c in columns] for r in lines]
    heads, *below = (f"| {' | '.join(row)} |\n" for row in [columns, *rows])
    return "".join([heads, f"|{'---|' * len(columns)}\n", *below])


#: of absolute relative errors
TOLERANCE = 0.1
_EXACT = 1e-9
#: roles of numbers that prove something where they are met
JUDGED = ("predicted", "inferred", "formula")

Word = Literal["yes", "in part", "no", "not run"]


@dataclass(frozen=True)
class PaperVerdict:
    """What became of some published numbers.

    Attributes:
        judged, met: how many numbers and statuses.
        errors: absolute relative errors of the numbers that are no formulas.
        formula_errors: those of closed forms at their cells.
    """

    judged: int
    met: int
    errors: Sequence[float]
    formula_errors: Sequence[float] = ()

    @property
    def word(self) -> Word:
        if not self.judged:
            return "not run"
        if self.met == self.judged:
            return "yes"
        return "no" if 2 * self.met < self.judged else "in part"

    @property
    def median(self) -> float | None:
        return median(self.errors) if self.errors else None


def verdict_on(records: Sequence[Comparison]) -> PaperVerdict:
    """The verdict on records of findings, each published number and run counted once, by its first record."""
    judged = (r for r in distinct(records) if r.role in JUDGED)
    numbers = [r for r in judged if r.reproduced is not None or r.status_reproduced]
    records = [record for record in records if record.role in JUDGED]
    formulas = grouped((r for r in records if r.role == "formula"), lambda r: r.source)
    # a formula is one number that is evaluated at many cells
    met = [
        all(r.published == r.reproduced or _is_within(r, _EXACT) for r in formulas[record.source])
        if record.role == "formula"
        else _is_within(record, TOLERANCE)
        for record in numbers
    ]
    runs: dict[str, bool] = {}  # published as out of memory and run here: whether ours ran out of it too
    for record in records:
        if record.status_published == "oom" and record.status_reproduced:
            runs.setdefault(record.published_run, record.status_reproduced == "oom")
    met += runs.values()
    errors = absolute_errors(record for record in numbers if record.role != "formula")
    return PaperVerdict(len(met), sum(met), errors, absolute_errors(chain.from_iterable(formulas.values())))


def absolute_errors(records: Iterable[Comparison]) -> list[float]:
    """The absolute relative errors of the records that have one."""
    return [abs(record.relative_error) for record in records if record.relative_error is not None]


def _is_within(record: Comparison, tolerance: float) -> bool:
    return record.relative_error is not None and abs(record.relative_error) <= tolerance


def counts(verdict: PaperVerdict) -> str:
    """The numbers of a verdict in words."""
    if not verdict.judged:
        return "nothing was judged"
    text = f"{verdict.met} of {verdict.judged} numbers met"
    if verdict.median is not None:
        text += f", median error {percent(verdict.median)}, worst {percent(max(verdict.errors), 0)}"
    if (worst := max(verdict.formula_errors, default=0.0)) > _EXACT:
        text += f"{'; closed forms' if verdict.errors else ', closed forms'} off by up to {percent(worst, 0)}"
    return text
