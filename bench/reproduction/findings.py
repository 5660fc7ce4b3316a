"""What reproducing a paper found, from the files that `spbench reproduce` wrote: its tables and its verdict.

A published number may be compared several times: in variants of the settings, in several readings of a paper,
or in two figures that show the same run. It is counted once, by its first comparison.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

from spbench.bench.config.scenario import Document
from spbench.bench.errors import UserError, suggestion
from spbench.bench.published.answers.tables import UNSTATED
from spbench.bench.published.compared import Role
from spbench.bench.reproduction.comparisons import number_or_status

Line = dict[str, Any]
Record = Mapping[str, Any]
NUMBERS = ("published", "reproduced", "relative_error")
#: the roles of published numbers, in the order in which they are listed
ROLES = ("predicted", "inferred", "calibrated", "formula")
assert set(ROLES) | {"curve"} == set(get_args(Role))


def read_records(path: Path) -> list[Record]:
    """The lines of a file of `spbench reproduce`, numbers as float, or None where there is none.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows: list[dict[str, Any]] = list(csv.DictReader(stream))
        for row in rows:
            row |= {name: float(row[name]) if row[name] else None for name in NUMBERS if name in row}
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return list(rows)


@dataclass(frozen=True)
class Findings:
    """The lines of PAPER.csv and PAPER_runs.csv.

    Attributes:
        documents: the scenario files by scenario, for titles and for what is written by hand of a scenario.
    """

    paper: str
    records: list[Record]
    runs: list[Record]
    documents: Mapping[str, Document] = field(default_factory=dict)

    @property
    def scenarios(self) -> list[str]:
        return [run["scenario"] for run in self.runs]

    def blocks(self, scenario: str) -> Iterator[tuple[str, list[Line]]]:
        """The tables of a scenario: (title, lines), claims first."""
        mine = [r for r in self.records if r["scenario"] == scenario]
        claims = [r for r in mine if r["role"] != "formula" and not of_table(r)]
        if claims:
            yield "claims", [_claim_line(r) for r in claims]
        for (table, quantity, variant), kept in by_table(mine).items():
            title = f"{table}, {quantity}" + (f" ({variant})" if variant else "")
            title += f": {errors_by_role(kept)}{_statuses(kept, '; status right in ')}"
            yield title, _table_lines(kept)
        formulas = [r for r in mine if r["role"] == "formula"]
        if formulas:
            yield "formulas", _formula_lines(formulas)

    def verdict(self) -> list[Line]:
        """A line for each published table and quantity, and for the claims, formulas and curves of a
        scenario; the last line is of all numbers of the paper."""
        lines = []
        for scenario in self.scenarios:
            groups: dict[tuple[str, str], list[Record]] = {}
            for r in self.records:
                if r["scenario"] == scenario:
                    what = f"{table_of(r)}: {r['quantity']}" if of_table(r) else _kind(r)
                    groups.setdefault((what, r["variant"]), []).append(r)
            document = self.documents.get(scenario)
            remark = document.not_reproduced if document else ""
            for (what, variant), rows in groups.items():
                lines.append(_verdict_line(scenario, what, variant, rows, remark))
                remark = ""
        # an error for each cell of a formula, one for any other number
        once = {id(r) for r in distinct(self.records)}
        rows = [r for r in self.records if id(r) in once or r["role"] == "formula"]
        return [*lines, _verdict_line("all", "", "", rows, "")]

    def part(self, name: str) -> str:
        """What was found of a scenario, in Markdown.

        Raises:
            UserError: there is no such scenario.
        """
        if name not in self.scenarios:
            raise UserError(f"nothing was reproduced under {name!r}{suggestion(name, self.scenarios)}")
        run = next(run for run in self.runs if run["scenario"] == name)
        statuses = ("ok", "oom", "unsupported", "failed")
        counts = ", ".join(f"{run[s]} {s}" for s in statuses if run[s] != "0")
        text = [f"{run['cells']} cells ({counts}), {_seconds(run['cell_seconds'])} of one core in all.\n"]
        text += [f"{title[0].upper()}{title[1:]}\n\n{markdown(lines)}" for title, lines in self.blocks(name)]
        return "\n".join(text)


def distinct(records: Sequence[Record]) -> list[Record]:
    """The records of published numbers, each number once: the first of those that have the same source, or
    that are of the same quantity of the same run (and of the same rank, step and measurement of it)."""
    seen: set[object] = set()
    kept = []
    for record in records:
        same: set[object] = {record["source"]}
        if of_table(record):
            same.add((record["cell"], record["quantity"], label_of(record)))
        if record["published"] is not None and not same & seen:
            kept.append(record)
            seen |= same
    return kept


@dataclass(frozen=True)
class RoleErrors:
    """The errors of published numbers of one role.

    Attributes:
        numbers: how many distinct published numbers.
        median, worst: of the absolute relative errors; None where no number of ours stands beside any.
    """

    role: str
    numbers: int
    median: float | None
    worst: float | None


def role_errors(records: Sequence[Record]) -> list[RoleErrors]:
    """The errors of each role that has a published number, in the order of :data:`ROLES`."""
    found = []
    for role in ROLES:
        rows = [r for r in records if r["role"] == role]
        numbers = distinct(rows)
        # a formula is one number, and is evaluated at many cells
        compared = rows if role == "formula" else numbers
        errors = [abs(r["relative_error"]) for r in compared if r["relative_error"] is not None]
        if numbers:
            found.append(
                RoleErrors(role, len(numbers), median(errors), max(errors))
                if errors
                else RoleErrors(role, len(numbers), None, None)
            )
    return found


def errors_by_role(records: Sequence[Record]) -> str:
    """Of each role, how many numbers there are, and the median and the worst absolute error."""
    digits = _digits(records)
    parts = [
        f"{of.numbers} {of.role}"
        + ("" if of.worst is None else f", median error {of.median:.{digits}%}, worst {of.worst:.{digits}%}")
        for of in role_errors(records)
    ]
    gaps = [r["reproduced"] for r in records if r["quantity"] == "largest_deviation" and r["reproduced"]]
    if any(r["role"] == "curve" for r in records):
        parts.append(f"curves differ by at most {max(gaps):.0e}" if gaps else "curves")
    return "; ".join(parts) or "no published number at hand"


def _statuses(records: Sequence[Record], before: str = "") -> str:
    """Of the published statuses, how many ours agree with."""
    stated = [r for r in records if r["status_published"] not in ("", UNSTATED)]
    right = sum(r["status_published"] == r["status_reproduced"] for r in stated)
    return f"{before}{right} of {len(stated)}" if stated else ""


def _verdict_line(scenario: str, what: str, variant: str, rows: Sequence[Record], remark: str) -> Line:
    return {
        "scenario": scenario,
        "compared": what,
        "variant": variant,
        "numbers": len(distinct(rows)),
        "errors": errors_by_role(rows),
        "statuses right": _statuses(rows) if scenario != "all" else "",
        "what does not reproduce, and why": " ".join(remark.split()),
    }


def _kind(record: Record) -> str:
    return {"formula": "formulas", "curve": "curves"}.get(record["role"], "claims")


def of_table(record: Record) -> bool:
    """Whether a record is a row of a published table; claims and formulas carry no published status."""
    return bool(record["status_published"])


def by_table(records: Sequence[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """The records of published tables by table, quantity and variant, in the order of the first of each."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in filter(of_table, records):
        found.setdefault((table_of(record), record["quantity"], record["variant"]), []).append(record)
    return found


def table_of(record: Record) -> str:
    """The name of the published table that a record is of."""
    return str(record["table"]).partition(": ")[0]


def label_of(record: Record) -> str:
    """What tells a record from others of its cell: measurement, rank and step; "" for most tables."""
    return str(record["table"]).partition(": ")[2]


def _seconds(text: str) -> str:
    seconds = int(text)
    return f"{seconds} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _percent(error: float | None, digits: int = 1) -> str | None:
    return None if error is None else f"{error:+.{digits}%}"


def _digits(records: Sequence[Record]) -> int:
    """Digits of errors in percent after the point: repeated measurements of real machines tell smaller ones
    apart than papers do."""
    return 2 if any(label_of(record) for record in records if of_table(record)) else 1


def _claim_line(record: Record) -> Line:
    return {
        "claim": record["table"],
        "variant": record["variant"],
        "quantity": record["quantity"],
        **_values(record),
        "role": record["role"],
        "note": record["note"],
    }


def _table_lines(records: Sequence[Record]) -> list[Line]:
    """A line for each row of a table, with its model if there are several."""
    models = [record["cell"].split("/")[0] for record in records]
    return [
        {
            "model": model if len(set(models)) > 1 else "",
            "strategy": record["strategy"],
            # sizes, batch and length
            "cell": " ".join(record["cell"].split("/")[2:5]),
            "measured": label_of(record),
            **_values(record),
            "role": record["role"],
            "note": record["note"],
        }
        for model, record in zip(models, records, strict=True)
    ]


def _values(record: Record) -> Line:
    return {
        "published": number_or_status(record["published"], record["status_published"]),
        "ours": number_or_status(record["reproduced"], record["status_reproduced"]),
        "relative error": _percent(record["relative_error"], _digits([record])),
    }


def _formula_lines(records: Sequence[Record]) -> list[Line]:
    """A line for each formula: how many cells, and the largest error."""
    groups: dict[str, list[Record]] = {}
    for r in records:
        groups.setdefault(r["table"].split(",")[0], []).append(r)
    return [
        {
            "formula": name,
            "engines": ", ".join(sorted({r["cell"].split("/")[-2] for r in rows})),
            "cells": len(rows),
            "exactly met": sum(r["relative_error"] == 0 or r["published"] == r["reproduced"] for r in rows),
            "largest error": _percent(max((r["relative_error"] or 0 for r in rows), key=abs)),
        }
        for name, rows in groups.items()
    ]


def markdown(lines: Sequence[Line]) -> str:
    """A Markdown table; columns in which nothing stands are left out."""
    columns = [name for name in (lines[0] if lines else {}) if any(r[name] not in (None, "") for r in lines)]
    rows = [columns, ["---"] * len(columns)]
    rows += [["" if r[c] is None else str(r[c]).replace("|", "\\|") for c in columns] for r in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
