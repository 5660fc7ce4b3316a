"""The generated parts of REPRODUCE.md, from the files that `spbench reproduce` wrote and nothing else.

A part stands between lines ``<!-- spbench reproduce PAPER: NAME -->`` and ``<!-- end -->``, where NAME is a
scenario or ``summary``. What is outside of the parts is written by hand and left alone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from spbench.bench.comparison.claims import number_or_status
from spbench.bench.comparison.tables import UNSTATED
from spbench.bench.errors import UserError, suggestion

SUMMARY = "summary"
_PART = re.compile(
    r"(?P<begin>^<!-- spbench reproduce (?P<paper>[\w-]+): (?P<name>[\w-]+) -->\n)"
    r"(?P<text>.*?)(?P<end>^<!-- end -->)",
    re.DOTALL | re.MULTILINE,
)
_BEGIN = re.compile(r"^<!-- spbench reproduce ", re.MULTILINE)

Line = dict[str, Any]
Record = Mapping[str, Any]
NUMBERS = ("published", "reproduced", "relative_error")


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
    """What came of reproducing a paper: the lines of PAPER.csv and PAPER_runs.csv."""

    paper: str
    records: list[Record]
    runs: list[Record]

    @property
    def scenarios(self) -> list[str]:
        return [run["scenario"] for run in self.runs]

    def blocks(self, scenario: str) -> Iterator[tuple[str, list[Line]]]:
        """The tables of a scenario: (title, lines), claims first."""
        mine = [r for r in self.records if r["scenario"] == scenario]
        claims = [r for r in mine if r["role"] != "formula" and not _of_table(r)]
        if claims:
            yield "claims", [_claim_line(r) for r in claims]
        for (table, quantity, variant), rows in groupby(
            filter(_of_table, mine), lambda r: (r["table"], r["quantity"], r["variant"])
        ):
            kept = list(rows)
            title = f"{table}, {quantity}" + (f" ({variant})" if variant else "")
            yield f"{title}: {_errors(kept)}", _table_lines(kept)
        formulas = [r for r in mine if r["role"] == "formula"]
        if formulas:
            yield "formulas", _formula_lines(formulas)

    def summary(self) -> list[Line]:
        """A line for each table and quantity, and for the claims of each scenario."""
        lines = []
        for scenario in self.scenarios:
            mine = [r for r in self.records if r["scenario"] == scenario]
            groups: dict[tuple[str, str, str], list[Record]] = {}
            for r in mine:
                what = r["table"] if _of_table(r) else "formulas" if r["role"] == "formula" else "claims"
                quantity = r["quantity"] if _of_table(r) else ""
                groups.setdefault((what, quantity, r["variant"]), []).append(r)
            lines += [_summary_line(scenario, *key, rows) for key, rows in groups.items()]
        return lines

    def part(self, name: str) -> str:
        """The generated part of that name, in Markdown.

        Raises:
            UserError: there is no such part.
        """
        if name == SUMMARY:
            return markdown(self.summary())
        if name not in self.scenarios:
            known = [SUMMARY, *self.scenarios]
            raise UserError(f"nothing was reproduced under {name!r}{suggestion(name, known)}")
        run = next(run for run in self.runs if run["scenario"] == name)
        statuses = ("ok", "oom", "unsupported", "failed")
        counts = ", ".join(f"{run[s]} {s}" for s in statuses if run[s] != "0")
        text = [f"{run['cells']} cells ({counts}), {_seconds(run['cell_seconds'])} of one core in all.\n"]
        text += [f"{title[0].upper()}{title[1:]}\n\n{markdown(lines)}" for title, lines in self.blocks(name)]
        return "\n".join(text)


def _of_table(record: Record) -> bool:
    """Whether a record is a row of a published table; claims and formulas carry no published status."""
    return bool(record["status_published"])


def _seconds(text: str) -> str:
    seconds = int(text)
    return f"{seconds} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _percent(error: float | None) -> str | None:
    return None if error is None else f"{error:+.1%}"


def _short(cell: str) -> str:
    """Sizes, batch and length of a cell's key."""
    parts = cell.split("/")
    return " ".join(parts[2:5])


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
    """A line for each row of a table; the model is told where there are several."""
    models = [record["cell"].split("/")[0] for record in records]
    return [
        {
            "model": model if len(set(models)) > 1 else "",
            "strategy": record["strategy"],
            "cell": _short(record["cell"]),
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
        "relative error": _percent(record["relative_error"]),
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
            "numbers": len(rows),
            "exactly met": sum(r["relative_error"] == 0 or r["published"] == r["reproduced"] for r in rows),
            "largest error": _percent(max((r["relative_error"] or 0 for r in rows), key=abs)),
        }
        for name, rows in groups.items()
    ]


def _statistics(records: Sequence[Record]) -> Line:
    """How many are predicted; median and worst absolute error of all but the calibrated; and of the
    statuses, how many agree."""
    errors = [
        abs(r["relative_error"])
        for r in records
        if r["relative_error"] is not None and r["role"] != "calibrated"
    ]
    stated = [r for r in records if r["status_published"] not in ("", UNSTATED)]
    right = sum(r["status_published"] == r["status_reproduced"] for r in stated)
    return {
        "predicted": sum(r["role"] == "predicted" and r["relative_error"] is not None for r in records),
        "calibrated": sum(r["role"] == "calibrated" and r["relative_error"] is not None for r in records),
        "median error": f"{median(errors):.1%}" if errors else None,
        "worst error": f"{max(errors):.1%}" if errors else None,
        "statuses right": f"{right} of {len(stated)}" if stated else None,
    }


def _errors(records: Sequence[Record]) -> str:
    found = _statistics(records)
    if found["statuses right"] is None:
        return "no number is published"
    text = f"{found['predicted']} predicted"
    if found["predicted"]:
        text += f", median error {found['median error']}, worst {found['worst error']}"
    return f"{text}; status right in {found['statuses right']}"


def _summary_line(scenario: str, what: str, quantity: str, variant: str, rows: Sequence[Record]) -> Line:
    return {
        "scenario": scenario,
        "table": what,
        "quantity": quantity,
        "variant": variant,
        "numbers": len(rows),
        **_statistics(rows),
    }


def markdown(lines: Sequence[Line]) -> str:
    """A Markdown table; columns in which nothing stands are left out."""
    columns = [name for name in (lines[0] if lines else {}) if any(r[name] not in (None, "") for r in lines)]
    rows = [columns, ["---"] * len(columns)]
    rows += [["" if r[c] is None else str(r[c]).replace("|", "\\|") for c in columns] for r in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# -- the document ----------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def check_document(path: Path, paper: str, scenarios: Sequence[str]) -> None:
    """Refuse a document that the parts of a paper cannot be written into.

    Raises:
        UserError: it cannot be read, a part has no end, is of no scenario, or a scenario has no part.
    """
    text = _read(path)
    parts = list(_PART.finditer(text))
    if len(_BEGIN.findall(text)) != len(parts):
        raise UserError(f"{path}: a part begins that does not end with <!-- end -->, or has no PAPER: NAME")
    there = [part["name"] for part in parts if part["paper"] == paper]
    for name in there:
        if name not in (SUMMARY, *scenarios):
            raise UserError(f"{path}: no scenario of {paper} is called {name!r}{suggestion(name, scenarios)}")
    if missing := [name for name in scenarios if name not in there]:
        marker = f"<!-- spbench reproduce {paper}: {missing[0]} -->"
        raise UserError(f"{path} has no part for {', '.join(missing)}: add {marker} and <!-- end --> to it")


def rendered(text: str, found: Findings) -> str:
    """A document with the parts of the findings' paper written anew.

    Raises:
        UserError: a part has a name under which nothing was reproduced.
    """

    def part(match: re.Match[str]) -> str:
        if match["paper"] != found.paper:
            return match[0]
        return f"{match['begin']}{found.part(match['name'])}{match['end']}"

    return _PART.sub(part, text)


def write_document(path: Path, found: Findings) -> Path:
    """Write the generated parts of a document anew; returns its path.

    Raises:
        UserError: it cannot be read or written, or a part is of no scenario.
    """
    text = _read(path)
    new = rendered(text, found)
    try:
        if new != text:
            path.write_text(new, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path
