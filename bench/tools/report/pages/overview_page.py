"""The first page: whether papers reproduce and what changed; ours over published numbers, and how the methods
compare; then errors and machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pandas import DataFrame

from spbench.bench.measure import commit_of, engine_classes
from spbench.bench.tools.papers.comparison import as_lines, joined
from spbench.bench.tools.papers.paper_findings import counts, distinct, role_errors, verdict_on
from spbench.bench.tools.papers.sources import MEASURED
from spbench.bench.tools.papers.validation import records_by_source, validation_lines
from spbench.bench.tools.report.gathered import Gathered, PaperResults
from spbench.bench.tools.report.page import DataTable, Page, dated, most_misses, quantity_words
from spbench.bench.tools.report.pages.advice_page import FOLDER, drawing, kept
from spbench.bench.tools.report.pages.regressions_page import changes
from spbench.plots.series import grouped

#: lines of the table of errors on the page
_MOST_ERRORS = 100
#: the question whose kept answer compares methods: model, cluster, GPUs, length
_COMPARED = ("llama3-8b", "dgx-h100", "64", "131072")


def pages(gathered: Gathered) -> Iterator[Page]:
    """The page index.html."""
    values = {
        "scatter": gathered.figure("predicted_and_measured", "Ours over the published number, by source"),
        "compared": [
            drawing("compared", lines) for lines in kept(gathered.results / FOLDER) if _is_compared(lines[0])
        ],
        "papers": list(map(_paper, gathered.papers)),
        "changes": list(changes(gathered)),
        "errors": [_by_role(gathered), _errors(gathered)],
        **_measured(gathered),
        "machines": _machines(gathered),
        **_cells(gathered),
    }
    title = "Sequence parallelism, reproduced"
    yield Page("index.html", title, "overview.md", values, order=0, short_title="Overview")


def _is_compared(line: Mapping[str, str]) -> bool:
    """Whether a line of kept answers belongs to the question that the page shows."""
    return tuple(line[name] for name in ("model", "cluster", "gpus", "seq_len")) == _COMPARED


def _paper(paper: PaperResults) -> dict[str, Any]:
    """Whether a paper reproduces, and why, in numbers; and what is known of others on its page."""
    records = paper.records_of("")
    verdict, misses = verdict_on(records), most_misses(records)
    scenario = paper.scenarios.get(misses[0]) if misses else None
    return {
        "about": paper.paper,
        "word": verdict.word,
        "counts": counts(verdict),
        "misses": misses,
        "title": scenario.document.title if scenario else misses and misses[0],
        "others": [(name, counts(verdict_on(paper.records_of(name)))) for name in paper.sources if name],
    }


def _by_role(gathered: Gathered) -> DataTable | None:
    """A line for each paper and role."""
    lines = []
    for paper in gathered.papers:
        records = paper.findings.records
        for of in role_errors(records):
            verdict = verdict_on(records[records["role"] == of.role])
            lines.append(
                {
                    "paper and role": f"{paper.paper.label}, {of.role}",
                    "median error": of.median,
                    "reproduces": verdict.word if verdict.judged else "not judged",
                    "worst error": of.worst,
                    "numbers": of.numbers,
                }
            )
    caption = "Distinct published numbers and the relative error of ours, absolute, by paper and role"
    return DataTable("verdict", caption, lines, percent=("median error", "worst error")) if lines else None


def _lines(records: DataFrame, *columns: str) -> list[dict[str, Any]]:
    """Records as lines for people: with the columns "ours" and its "error", and quantities in words."""
    names = {"relative_error": "error", "reproduced": "ours"}
    in_words = records.assign(quantity=records["quantity"].map(quantity_words))
    return as_lines(in_words.rename(columns=names), columns)


def _errors(gathered: Gathered) -> DataTable | None:
    """The error of every published number that is no closed form, the largest first."""
    numbers = [(paper.paper.label, distinct(paper.findings.records)) for paper in gathered.papers]
    records = joined(some.assign(where=f"{label}: " + some["table"]) for label, some in numbers)
    records = records[records["relative_error"].notna() & (records["role"] != "formula")]
    records = records.sort_values("relative_error", key=lambda errors: -errors.abs(), kind="stable")
    if not len(records):
        return None
    lines = _lines(records, "where", "error", "published", "ours", "quantity", "role", "cell")
    caption = (
        f"The {_MOST_ERRORS} largest relative errors, closed forms left out; the CSV has all {len(lines):,}"
    )
    return DataTable("errors", caption, lines, sortable=True, percent=("error",), most=_MOST_ERRORS)


def _measured(gathered: Gathered) -> dict[str, Any]:
    """The table of README.md: errors by who measured, beside other predictors' errors; then each number."""
    records = joined(each.findings.records for each in gathered.papers if each.paper.name == MEASURED)
    heads = ["quantity", "median error", "worst", "measured by, on", "numbers", "role", "other predictors"]
    columns = ("what", "error", "measured", "ours", "quantity", "role", "note")
    lines = [
        line
        for source, some in records_by_source(records).items()
        for line in _lines(
            some.assign(what=f"{source.measured_by}: " + some["label"], measured=some["published"]), *columns
        )
    ]
    caption = "Errors against real machines, ours and other predictors'"
    each = f"Ours beside what real machines measured, the first {_MOST_ERRORS} of {len(lines)}"
    tables = [
        DataTable("validation", caption, validation_lines(records), heads),
        gathered.figure(MEASURED, "ours beside what real machines measured"),
        DataTable("measured", each, lines, sortable=True, percent=("error",), most=_MOST_ERRORS),
    ]
    return {"measured": tables if len(records) else [], "measured_paper": MEASURED}


def _machines(gathered: Gathered) -> DataTable | None:
    """A line for each engine and cluster whose numbers are measured, not computed; None: there is none."""
    exact = {name for name, engine in engine_classes().items() if engine.is_exact}
    measured = [c.row for c in gathered.cells if c.row["cell"].get("engine", "virtual") not in exact]
    groups = grouped(measured, lambda row: (row["cell"]["engine"], row["cell"]["cluster"]))
    lines = [
        {
            "engine": engine,
            "cluster": cluster,
            "cells": len(rows),
            "ok": sum(row["status"] == "ok" for row in rows),
            "cells whose bytes equal the closed form": sum(map(_equals_closed_form, rows)),
            "hosts": ", ".join(sorted({str((row.get("provenance") or {}).get("host", "")) for row in rows})),
        }
        for (engine, cluster), rows in sorted(groups.items())
    ]
    caption = "Cells that ran on real ranks, by engine and cluster"
    return DataTable("machines", caption, lines) if lines else None


def _equals_closed_form(row: Mapping[str, Any]) -> bool:
    measured = row["measurement"]
    return bool(measured.get("communication")) and not measured.get("formula_difference")


def _cells(gathered: Gathered) -> dict[str, Any]:
    """How many cells there are, how they ended, and what made them."""
    rows = [cell.row for cell in gathered.cells]
    return {
        "cells": len(rows),
        "statuses": Counter(row["status"] for row in rows).most_common(),
        "made_by": {
            "from commit": _named(dated(commit_of(row)) for row in rows),
            "with torch": _named((row.get("provenance") or {}).get("torch") for row in rows),
        },
    }


def _named(values: Iterable[str | None]) -> str:
    """The values with how often they occur, the most frequent first; without counts if there is one."""
    counted = Counter(filter(None, values)).most_common()
    return counted[0][0] if len(counted) == 1 else ", ".join(f"{name}: {n} cells" for name, n in counted)
