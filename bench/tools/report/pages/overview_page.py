"""The first page: whether papers reproduce and what changed; then errors, machines and the best methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from spbench.bench.measure.engines.engine import engines
from spbench.bench.measure.sweep.provenance import commit_of
from spbench.bench.tools.papers.paper_findings import Record, distinct, label_of, role_errors
from spbench.bench.tools.papers.sources import MEASURED
from spbench.bench.tools.papers.validation import QUANTITY_NAMES, records_by_source, validation_lines
from spbench.bench.tools.report.best_methods import BY_BATCH, BY_LENGTH, best_chart
from spbench.bench.tools.report.changes_between import changes
from spbench.bench.tools.report.gathered import Gathered, PaperResults
from spbench.bench.tools.report.page import DataTable, Page
from spbench.bench.tools.report.published_tables import shown
from spbench.bench.tools.report.rendering import dated
from spbench.bench.tools.report.report_verdict import counts, verdict_on, why


def pages(gathered: Gathered) -> Iterator[Page]:
    """index.html."""
    best = "The best method by sequence length and GPUs, of those measured alike"
    longest = "The method with the longest sequence that fits, by batch and GPUs"
    heat_maps = [
        best_chart("best", best, gathered.cells, BY_LENGTH, "seq_len"),
        best_chart("longest", longest, gathered.cells, BY_BATCH, "batch"),
    ]
    measured = [
        record
        for paper in gathered.papers
        if paper.findings and paper.paper.name == MEASURED
        for record in paper.findings.records
    ]
    values = {
        "sentences": [_sentence(paper) for paper in gathered.papers],
        "changes": list(changes(gathered)),
        "counts": Counter(cell.row["status"] for cell in gathered.cells),
        "total": len(gathered.cells),
        "commits": _named(dated(commit_of(cell.row)) for cell in gathered.cells),
        "torches": _named((cell.row.get("provenance") or {}).get("torch") for cell in gathered.cells),
        "verdict": _by_role(gathered),
        "errors": _errors(gathered),
        "validation": _validation(measured),
        "measured": _measured(measured),
        "measured_figure": gathered.figure(MEASURED),
        "heat_maps": [chart for chart in heat_maps if chart is not None],
        "machines": _machines(gathered),
    }
    yield Page(
        "index.html",
        "Sequence parallelism, reproduced",
        "overview.html",
        values,
        order=0,
        short_title="Overview",
    )


def _sentence(paper: PaperResults) -> dict[str, Any]:
    """Whether a paper reproduces, and why, in numbers; and what is known of others on its page."""
    records = paper.records_of("")
    verdict = verdict_on(records)
    titles = {name: scenario.document.title for name, scenario in paper.scenarios.items()}
    return {
        "others": [
            (source, counts(verdict_on(paper.records_of(source)))) for source in paper.sources if source
        ],
        "paper": paper.paper,
        "path": f"paper-{paper.paper.name}.html",
        "word": verdict.word,
        "counts": counts(verdict),
        "finding": paper.paper.finding,
        "why": why(records, titles),
    }


def _named(values: Iterator[str | None]) -> str:
    """The values with how often they occur, the most frequent first; without counts if there is one."""
    counted = Counter(filter(None, values)).most_common()
    return counted[0][0] if len(counted) == 1 else ", ".join(f"{name}: {n} cells" for name, n in counted)


def _by_role(gathered: Gathered) -> DataTable:
    """A line for each paper and role."""
    lines = []
    for paper in gathered.papers:
        records = paper.findings.records if paper.findings else []
        for of in role_errors(records):
            verdict = verdict_on([record for record in records if record["role"] == of.role])
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
    return DataTable("verdict", caption, lines, percent=("median error", "worst error"))


def _errors(gathered: Gathered) -> DataTable | None:
    """The error of every published number that is no closed form, the largest first."""
    lines = [
        {
            "where": f"{paper.paper.label}: {record['table']}",
            **shown(record, "error", "published", "ours", "quantity", "role", "cell"),
        }
        for paper in gathered.papers
        if paper.findings
        for record in distinct(paper.findings.records)
        if record["relative_error"] is not None and record["role"] != "formula"
    ]
    lines.sort(key=lambda line: -abs(line["error"]))
    caption = "Relative error of every published number that is not a closed form, the largest first"
    return DataTable("errors", caption, lines, sortable=True, percent=("error",)) if lines else None


def _validation(records: Sequence[Record]) -> DataTable | None:
    """The table of README.md: errors by who measured, beside those of other predictors."""
    caption = "Errors against real machines, ours and those of other predictors"
    lines = validation_lines(records) if records else []
    heads = ["predicted by", "median error", "quantity", "measured by, on", "numbers", "mean", "worst"]
    return DataTable("validation", caption, lines, [*heads, "role, or source"]) if lines else None


def _measured(records: Sequence[Record]) -> DataTable | None:
    """Ours beside every number that a real machine measured."""
    lines = [
        {
            "what": f"{source.measured_by}: {label_of(record)}",
            **shown(record, "error", "measured", "ours"),
            "quantity": _with_unit(record["quantity"]),
            **shown(record, "role", "note"),
        }
        for source, some in records_by_source(records).items()
        for record in some
    ]
    caption = "Ours beside what real machines measured"
    return DataTable("measured", caption, lines, sortable=True, percent=("error",)) if lines else None


def _with_unit(quantity: str) -> str:
    """A quantity of measured machines, as "peak memory (GiB)"."""
    unit = {"gib": "GiB", "ms": "ms"}.get(quantity.rpartition("_")[2])
    return QUANTITY_NAMES.get(quantity, quantity) + (f" ({unit})" if unit else "")


def _machines(gathered: Gathered) -> DataTable | None:
    """A line for each engine and cluster whose numbers are measured, not computed."""
    exact = {name for name, engine in engines().items() if engine.is_exact}
    groups: dict[tuple[str, str], list[Any]] = {}
    for cell in gathered.cells:
        of = cell.row["cell"]
        if of.get("engine", "virtual") not in exact:
            groups.setdefault((of["engine"], of["cluster"]), []).append(cell.row)
    lines = [
        {
            "engine": engine,
            "cluster": cluster,
            "cells": len(rows),
            "ok": sum(row["status"] == "ok" for row in rows),
            "cells whose bytes equal the closed form": sum(
                bool(row["measurement"].get("communication"))
                and not row["measurement"].get("formula_difference")
                for row in rows
            ),
            "hosts": ", ".join(sorted({str((row.get("provenance") or {}).get("host", "")) for row in rows})),
        }
        for (engine, cluster), rows in sorted(groups.items())
    ]
    caption = "Cells that ran on real ranks, by engine and cluster"
    return DataTable("machines", caption, lines) if lines else None
