"""The first page: how well papers reproduce, what ran, and which method is the best where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from spbench.bench.engines.engine import engines
from spbench.bench.report.best_methods import BY_BATCH, BY_LENGTH, best_chart
from spbench.bench.report.charts import ROLE_COLORS, ROW_HEIGHT, spec_of
from spbench.bench.report.gathered import Gathered
from spbench.bench.report.measured_charts import measured_chart
from spbench.bench.report.page import Chart, DataTable, Page, Panel
from spbench.bench.reproduction.findings import Record, distinct, role_errors
from spbench.bench.reproduction.papers import MEASURED
from spbench.bench.reproduction.validation import validation_lines
from spbench.bench.sweep.provenance import commit_of


def pages(gathered: Gathered) -> Iterator[Page]:
    """index.html."""
    heat_maps = [
        best_chart(
            "best",
            "The best method by sequence length and GPUs, of those measured alike",
            gathered.cells,
            BY_LENGTH,
            "seq_len",
        ),
        best_chart(
            "longest",
            "The method with the longest sequence that fits, by batch and GPUs",
            gathered.cells,
            BY_BATCH,
            "batch",
        ),
    ]
    measured = _measured(gathered)
    values = {
        "counts": Counter(cell.row["status"] for cell in gathered.cells),
        "total": len(gathered.cells),
        "commits": _named(commit_of(cell.row) for cell in gathered.cells),
        "torches": _named((cell.row.get("provenance") or {}).get("torch") for cell in gathered.cells),
        "verdict": _verdict(gathered),
        "errors": _errors(gathered),
        "validation": _validation(measured),
        "measured": measured_chart(measured),
        "unreproduced": [paper.paper for paper in gathered.papers if paper.findings is None],
        "heat_maps": [chart for chart in heat_maps if chart is not None],
        "machines": _machines(gathered),
    }
    yield Page(
        "index.html",
        "Sequence parallelism, measured and reproduced",
        "overview.html",
        values,
        order=0,
        short_title="Overview",
        summary="Which published results on sequence parallelism reproduce, and which method is best where.",
    )


def _named(values: Iterator[str | None] | Sequence[str | None]) -> str:
    """The values with how often they occur, the most frequent first; without counts if there is one."""
    counts = Counter(value for value in values if value)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count} cells)" for name, count in sorted(counts.items(), key=lambda c: -c[1]))


def _verdict(gathered: Gathered) -> DataTable:
    """A line for each paper and role."""
    lines: list[dict[str, Any]] = []
    for paper in gathered.papers:
        records = paper.findings.records if paper.findings else []
        for of in role_errors(records):
            lines.append(
                {
                    "paper": paper.paper.label,
                    "role": of.role,
                    "numbers": of.numbers,
                    "median error": of.median,
                    "worst error": of.worst,
                }
            )
    return DataTable(
        "verdict",
        "Distinct published numbers and the relative error of ours, absolute, by paper and role",
        lines,
        percent=("median error", "worst error"),
    )


def _errors(gathered: Gathered) -> Chart | None:
    """The error of every published number, a row for each paper."""
    lines = [
        {
            "paper": paper.paper.label,
            "role": record["role"],
            "where": record["table"],
            "quantity": record["quantity"],
            "cell": record["cell"],
            "published": record["published"],
            "ours": record["reproduced"],
            "relative error": record["relative_error"],
        }
        for paper in gathered.papers
        if paper.findings
        for record in distinct(paper.findings.records)
        if record["relative_error"] is not None and record["role"] != "formula"
    ]
    if not lines:
        return None
    roles = [role for role in ROLE_COLORS if any(line["role"] == role for line in lines)]
    names = list(dict.fromkeys(line["paper"] for line in lines))
    panels = [Panel(name, _strip([line for line in lines if line["paper"] == name], roles)) for name in names]
    caption = "Relative error of every published number that is not a closed form, by paper and role"
    worst = max(lines, key=lambda line: abs(line["relative error"]))
    close = sum(abs(line["relative error"]) <= 0.1 for line in lines) / len(lines)
    return Chart(
        "errors",
        caption,
        f"{caption}. {close:.0%} of {len(lines)} are within 10%; the furthest is {worst['where']} of "
        f"{worst['paper']} at {worst['relative error']:+.0%}.",
        {},
        DataTable("errors", caption, lines, sortable=True, percent=("relative error",)),
        panels=panels,
    )


def _measured(gathered: Gathered) -> Sequence[Record]:
    """The records of measurements of real machines; none where they were not reproduced."""
    found = [paper.findings for paper in gathered.papers if paper.paper.name == MEASURED]
    return [record for findings in found if findings for record in findings.records]


def _validation(records: Sequence[Record]) -> DataTable | None:
    """The table of README.md: errors by who measured, beside those of other predictors."""
    caption = "Errors against real machines, ours and those of other predictors"
    return DataTable("validation", caption, validation_lines(records)) if records else None


def _strip(lines: Sequence[dict[str, Any]], roles: Sequence[str]) -> dict[str, Any]:
    """A tick for each error, a row for each role."""
    color = alt.Scale(domain=roles, range=[ROLE_COLORS[role] for role in roles])
    axis = alt.Axis(format="+.0%", tickCount=6)
    ticks = (
        alt.Chart()
        .mark_tick(thickness=2, size=16, opacity=0.75)
        .encode(
            x=alt.X("error:Q", title="relative error", axis=axis),
            y=alt.Y("role:N", title=None, scale=alt.Scale(domain=roles)),
            color=alt.Color("role:N", scale=color, legend=None),
            tooltip=["where:N", "quantity:N", "published:Q", "ours:Q", alt.Tooltip("error:Q", format="+.1%")],
        )
        .properties(width="container", height=ROW_HEIGHT * len(roles))
    )
    return spec_of(ticks, [{**line, "error": line["relative error"]} for line in lines])


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
    return (
        DataTable("machines", "Cells that ran on real ranks, by engine and cluster", lines) if lines else None
    )
