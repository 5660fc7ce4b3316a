"""The findings of a paper's reproduction: its records, their errors by role, its tables and its verdict.

A published number that is compared several times, as in variants, counts once, by its first comparison.

Numbers reproduce, do in part, or do not, by one rule for a table and for a paper. A number is met where ours
is within :data:`TOLERANCE` of it (a formula: equal at every cell), a published out of memory where ours is
too. "Yes" is all met, "no" fewer than half; numbers that a rate was fitted to are not judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from spbench.bench.command_line.output import Table
from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.measure import Document
from spbench.bench.tools.papers.answers.tables import UNSTATED
from spbench.bench.tools.papers.comparison import (
    Comparison,
    Role,
    groups,
    is_time,
    lines_of,
    number_or_status,
)
from spbench.bench.units import difference, percent, three_digits

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Line = dict[str, Any]
TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))

#: the roles of published numbers, in the order in which they are listed
ROLES: tuple[Role, ...] = ("predicted", "inferred", "calibrated", "formula")
assert set(ROLES) | {"curve"} == set(get_args(Role))


@dataclass(frozen=True)
class PaperFindings:
    """The lines of PAPER.csv (:func:`frame_of`) and of PAPER_runs.csv. ``documents``: the scenario files by
    scenario, for titles and for remarks written by hand. ``orders``: by scenario, lines of
    :func:`order_lines`."""

    paper: str
    records: DataFrame
    runs: Sequence[Mapping[str, str]]
    documents: Mapping[str, Document] = field(default_factory=dict)
    orders: Mapping[str, list[Line]] = field(default_factory=dict)

    @property
    def scenarios(self) -> list[str]:
        """The names of the scenarios, in the order of the runs."""
        return [run["scenario"] for run in self.runs]

    def of(self, *scenarios: str) -> DataFrame:
        """The records of the scenarios with these names."""
        return self.records[self.records["scenario"].isin(scenarios)]

    def blocks(self, scenario: str) -> Iterator[tuple[str, list[Line]]]:
        """The tables of a scenario: (title, lines), claims first."""
        mine = self.of(scenario)
        formulas = mine[mine["role"] == "formula"]
        if len(claims := mine[(mine["role"] != "formula") & ~mine["of_table"]]):
            yield "claims", _lines("claim", claims)
        tables = groups(mine[mine["of_table"]], "table_name", "quantity", "variant")
        for (table, quantity, variant), rows in tables:
            title = f"{table}, {quantity}" + (f" ({variant})" if variant else "")
            statuses = _statuses(rows)
            title += f": {errors_by_role(rows)}" + (f"; status right in {statuses}" if statuses else "")
            yield title, _lines("row", rows, several=rows["cell"].str.split("/").str[0].nunique() > 1)
        if order := self.orders.get(scenario):
            yield "order of the layouts of a run (Kendall's tau)", order
        if len(formulas):
            yield "formulas", _formula_lines(formulas)

    def verdict(self) -> list[Line]:
        """A line for each published table and quantity, and for the claims, formulas and curves of a
        scenario; the last line is of all numbers of the paper."""
        lines = []
        for scenario in self.scenarios:
            mine = self.of(scenario)
            # ratios without a published number get no verdict
            answered = mine[(mine["quantity"] != "ratio") | mine["published"].notna()]
            answered = answered if len(answered) else mine
            for (what, variant), rows in groups(answered, "answer", "variant"):
                lines.append(_verdict_line(scenario, what, variant, rows, _statuses(rows)))
        # an error for each cell of a formula, one for any other number
        of_formulas = self.records["role"] == "formula"
        counted = of_formulas | self.records.index.isin(distinct(self.records).index)
        return [*lines, _verdict_line("all", "", "", self.records[counted])]

    def part(self, name: str) -> str:
        """A scenario's results in Markdown: counts of cells, time and tables."""
        run = next(run for run in self.runs if run["scenario"] == name)
        statuses = ("ok", "oom", "unsupported", "failed")
        counts = ", ".join(f"{run[s]} {s}" for s in statuses if run[s] != "0")
        seconds = int(run["cell_seconds"])
        time = f"{seconds} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        text = [f"{run['cells']} cells ({counts}), {time} of one core in all.\n"]
        text += [f"{title[0].upper()}{title[1:]}\n\n{markdown(lines)}" for title, lines in self.blocks(name)]
        return "\n".join(text)


# -- records and their errors -------------------------------------------------------------------------------


def distinct(records: DataFrame) -> DataFrame:
    """The records of published numbers, each number once. Two are the same number if they have one source or,
    in a table, one cell, quantity and label (which tells the rank, the step and the measurement)."""
    numbers = records[records["published"].notna()]
    places = zip(*(numbers[name] for name in ("cell", "quantity", "label")), strict=True)
    seen, is_first = set[object](), list[bool]()
    for source, place, of_table in zip(numbers["source"], places, numbers["of_table"], strict=True):
        same = {source, place} if of_table else {source}
        is_first.append(not same & seen)
        seen |= same if is_first[-1] else set()
    return numbers.loc[is_first]


class RoleErrors(NamedTuple):
    """The absolute errors of the distinct numbers of a role; None if none of them is reproduced."""

    role: str
    numbers: int
    median: float | None
    worst: float | None


def role_errors(records: DataFrame) -> list[RoleErrors]:
    """The errors of each role that has a published number, in the order of :data:`ROLES`."""
    of_roles = []
    for role in ROLES:
        rows = records[records["role"] == role]
        numbers = distinct(rows)
        # a formula is one number, and is evaluated at many cells
        errors = absolute_errors(rows if role == "formula" else numbers)
        if len(numbers):
            both = (median(errors), max(errors)) if errors else (None, None)
            of_roles.append(RoleErrors(role, len(numbers), *both))
    return of_roles


def errors_by_role(records: DataFrame) -> str:
    """In words: the count of numbers of each role, and the median and worst of their absolute errors."""
    # repeated measurements of real machines tell smaller errors apart than papers do
    digits = 2 if (records["of_table"] & (records["label"] != "")).any() else 1
    parts = []
    for of in role_errors(records):
        errors = f", median error {percent(of.median, digits)}, worst {percent(of.worst, digits)}"
        parts.append(f"{of.numbers} {of.role}{'' if of.worst is None else errors}")
    if (records["role"] == "curve").any():
        gap = records.loc[records["quantity"] == "largest_deviation", "reproduced"].max()
        parts.append(f"curves differ by at most {gap:.0e}" if gap > 0 else "curves")
    return "; ".join(parts) or "no published number at hand"


def _statuses(records: DataFrame) -> str:
    """How many of the published statuses equal ours, such as "3 of 4"; "" if no status was published."""
    stated = records[~records["status_published"].isin(["", UNSTATED])]
    right = (stated["status_published"] == stated["status_reproduced"]).sum()
    return f"{right} of {len(stated)}" if len(stated) else ""


# -- lines of tables -----------------------------------------------------------------------------------------


def _verdict_line(scenario: str, what: str, variant: str, rows: DataFrame, statuses: str = "") -> Line:
    about = {"scenario": scenario, "compared": what, "variant": variant, "numbers": len(distinct(rows))}
    return about | {"errors": errors_by_role(rows), "statuses right": statuses}


def _lines(about: str, records: DataFrame, **values: Any) -> list[Line]:
    """A line for each record: what the form ``about`` says of it, the published number and ours."""
    return [
        TABLES.record(about, record, **values)
        | compared(record, 2 if record.of_table and record.label else 1)
        for record in lines_of(records)
    ]


def compared(record: Any, digits: int = 1) -> Line:
    """The published number and ours of a comparison, as a line; ``digits``: digits of the error in percent
    after the point."""
    shown = three_digits if is_time(record.quantity) else None
    return TABLES.record("compared", record, number_or_status=number_or_status, shown=shown, digits=digits)


def _formula_lines(records: DataFrame) -> list[Line]:
    """A line for each formula: its engines, number of cells, and largest error."""
    return [
        {
            "formula": name,
            "engines": ", ".join(sorted({cell.split("/")[-2] for cell in rows["cell"]})),
            "cells": len(rows),
            "exactly met": int(
                ((rows["relative_error"] == 0) | (rows["published"] == rows["reproduced"])).sum()
            ),
            "largest error": difference(max(rows["relative_error"].fillna(0), key=abs)),
        }
        for name, rows in groups(records.assign(name=records["table"].str.split(",").str[0]), "name")
    ]


def markdown(lines: Sequence[Line]) -> str:
    """A Markdown table of the lines, without empty columns; "" without lines."""
    if not lines:
        return ""
    columns = [name for name in lines[0] if any(r[name] not in (None, "") for r in lines)]
    rows = [["" if r[c] is None else str(r[c]).replace("|", "\\|") for c in columns] for r in lines]
    heads, *below = (f"| {' | '.join(row)} |\n" for row in [columns, *rows])
    return "".join([heads, f"|{'---|' * len(columns)}\n", *below])


#: the largest absolute relative error of a met number
TOLERANCE = 0.1
_EXACT = 1e-9
#: roles of numbers that a verdict judges: met numbers of these roles prove something
JUDGED = ("predicted", "inferred", "formula")

Word = Literal["yes", "in part", "no", "not run"]


@dataclass(frozen=True)
class PaperVerdict:
    """The number of published numbers that are met, and the errors of all.

    Attributes:
        judged, met: how many numbers and statuses were judged, and how many of these are met.
        errors: absolute relative errors of numbers that are no formulas.
        formula_errors: absolute relative errors of closed forms at their cells.
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


def verdict_on(records: DataFrame) -> PaperVerdict:
    """The verdict on records of findings, each published number and run counted once, by its first record."""
    numbers, records = (some[some["role"].isin(JUDGED)] for some in (distinct(records), records))
    numbers = numbers[numbers["reproduced"].notna() | (numbers["status_reproduced"] != "")]
    # a formula is one number that is evaluated at many cells
    formulas, others = records[records["role"] == "formula"], numbers[numbers["role"] != "formula"]
    exact = (formulas["published"] == formulas["reproduced"]) | _within(formulas, _EXACT)
    of_source = exact.groupby(formulas["source"]).all()
    exact = numbers.loc[numbers["role"] == "formula", "source"].map(of_source)
    oom = records[(records["status_published"] == "oom") & (records["status_reproduced"] != "")]
    # for runs published as out of memory: whether our run is out of memory too
    runs = oom.drop_duplicates("run")["status_reproduced"] == "oom"
    met = sum(int(each.sum()) for each in (exact, _within(others, TOLERANCE), runs))
    return PaperVerdict(len(numbers) + len(runs), met, absolute_errors(others), absolute_errors(formulas))


def absolute_errors(records: DataFrame) -> list[float]:
    """The absolute relative errors of the records that have one."""
    return records["relative_error"].abs().dropna().to_list()


def _within(records: DataFrame, tolerance: float) -> Series[bool]:
    return records["relative_error"].abs() <= tolerance


def counts(verdict: PaperVerdict) -> str:
    """The numbers of a verdict in words."""
    if not verdict.judged:
        return "nothing was judged"
    text = f"{verdict.met} of {verdict.judged} numbers are met"
    if (middle := verdict.median) is not None:
        text += f". The median error is {percent(middle)}, the worst {percent(max(verdict.errors), 0)}"
    if (worst := max(verdict.formula_errors, default=0.0)) > _EXACT:
        text += f". Errors exclude formulas of bytes; the worst formula is {percent(worst, 0)} off"
    return text


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """A table with a line for each published number. A terminal only counts closed forms that hold."""
    lines = [{"claim": c.claim, "variant": c.variant, **compared(c)} for c in comparisons]
    title = "Published and ours (relative error: ours / published - 1)"
    important = ("claim", "published", "ours", "relative error", "role")
    holding = [at for at, each in enumerate(comparisons) if _is_closed_form_that_holds(each)]
    folded = dict.fromkeys(holding, "bytes sent equal the closed form")
    return Table(title, lines, important, ("claim", "note"), folded)


def _is_closed_form_that_holds(entry: Comparison) -> bool:
    if entry.quantity != "sent_bytes" or entry.published is None or entry.reproduced is None:
        return False
    return isclose(entry.published, entry.reproduced)
