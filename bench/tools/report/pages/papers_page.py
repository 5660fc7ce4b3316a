"""The first page: whether papers reproduce, what changed, our numbers against published ones, a comparison of
methods, errors and machines. And a page for each paper: its tables and claims with our numbers, which numbers
are not met, and the scenarios' text."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pandas import DataFrame

from spbench.bench.measure import Scenario, engine_classes
from spbench.bench.row import commit_of
from spbench.bench.tools.papers.comparison import as_lines, groups, joined
from spbench.bench.tools.papers.paper_findings import (
    counts,
    distinct,
    errors_by_role,
    role_errors,
    verdict_on,
)
from spbench.bench.tools.papers.sources import MEASURED
from spbench.bench.tools.papers.validation import records_by_source, validation_lines
from spbench.bench.tools.report import page
from spbench.bench.tools.report.gathered import Gathered, PaperResults
from spbench.bench.tools.report.pages.advice_page import FOLDER, drawing, kept
from spbench.bench.tools.report.pages.regressions_page import changes
from spbench.plots.series import grouped

#: readers can sort a table of more lines than this
_LONG = 12
_STATUSES = {"ok": "ok", "oom": "out of memory", "unsupported": "unsupported", "failed": "failed"}
#: the most lines of the table of errors on the page
_MOST_ERRORS = 100
#: the question whose saved answer compares methods: model, cluster, number of GPUs, sequence length in tokens
_COMPARED = ("llama3-8b", "dgx-h100", "64", "131072")


def pages(gathered: Gathered) -> Iterator[page.Page]:
    """The page index.html, and paper-NAME.html for each paper."""
    fields = ("model", "cluster", "gpus", "seq_len")
    questions = kept(gathered.results / FOLDER)
    of_question = [lines for lines in questions if tuple(lines[0][of] for of in fields) == _COMPARED]
    values = {
        "scatter": gathered.figure("predicted_and_measured", "Ours over the published number, by source"),
        "compared": [drawing("compared", lines) for lines in of_question],
        "papers": list(map(_paper, gathered.papers)),
        "changes": list(changes(gathered)),
        "errors": [_by_role(gathered), _errors(gathered)],
        **_measured(gathered),
        "machines": _machines(gathered),
        **_cells(gathered),
    }
    title = "Sequence parallelism, reproduced"
    yield page.Page("index.html", title, "overview.md", values, order=0, short_title="Overview")
    yield from _pages_of_papers(gathered)


def _paper(paper: PaperResults) -> dict[str, Any]:
    """The first page's values for a paper: its verdict with counts, and the scenario with the most misses."""
    records = paper.records_of("")
    verdict, misses = verdict_on(records), page.most_misses(records)
    scenario = paper.scenarios.get(misses[0]) if misses else None
    return {
        "about": paper.paper,
        "word": verdict.word,
        "counts": counts(verdict),
        "misses": misses,
        "title": scenario.document.title if scenario else misses and misses[0],
        "others": [(name, counts(verdict_on(paper.records_of(name)))) for name in paper.sources if name],
    }


def _by_role(gathered: Gathered) -> page.DataTable | None:
    """A table with a line for each paper and role of numbers: median and worst error, and the verdict."""
    lines = []
    for paper in gathered.papers:
        records = paper.findings.records
        for of in role_errors(records):
            verdict = verdict_on(records[records["role"] == of.role])
            lines.append(page.TABLES.record("role", of, label=paper.paper.label, verdict=verdict))
    caption = "Distinct published numbers and the relative error of ours, absolute, by paper and role"
    return (
        page.DataTable("verdict", caption, lines, percent=("median error", "worst error")) if lines else None
    )


def _lines(records: DataFrame, *columns: str) -> list[dict[str, Any]]:
    """The ``columns`` of records as lines, with "ours", its relative "error", and quantities in words."""
    names = {"relative_error": "error", "reproduced": "ours"}
    in_words = records.assign(quantity=records["quantity"].map(page.quantity_words))
    return as_lines(in_words.rename(columns=names), columns)


def _errors(gathered: Gathered) -> page.DataTable | None:
    """A table of the error of every published number except closed forms, the largest error first."""
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
    return page.DataTable("errors", caption, lines, sortable=True, percent=("error",), most=_MOST_ERRORS)


def _measured(gathered: Gathered) -> dict[str, Any]:
    """The values on real machines: README.md's table of errors by source, a figure, and all numbers."""
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
    each = f"Ours compared with what real machines measured, the first {_MOST_ERRORS} of {len(lines)}"
    tables = [
        page.DataTable("validation", caption, validation_lines(records), heads),
        gathered.figure(MEASURED, "ours compared with what real machines measured"),
        page.DataTable("measured", each, lines, sortable=True, percent=("error",), most=_MOST_ERRORS),
    ]
    return {"measured": tables if len(records) else [], "measured_paper": MEASURED}


def _machines(gathered: Gathered) -> page.DataTable | None:
    """A table with a line for each cluster and engine with measured, not simulated, numbers; None without."""
    exact = {name for name, engine in engine_classes().items() if engine.is_exact}
    measured = [c.row for c in gathered.cells if c.row["cell"].get("engine", "virtual") not in exact]
    groups = grouped(measured, lambda row: (row["cell"]["engine"], row["cell"]["cluster"]))
    lines = []
    for (engine, cluster), rows in sorted(groups.items()):
        measurements = [row["measurement"] for row in rows]
        equal = sum(bool(of.get("communication")) and not of.get("formula_difference") for of in measurements)
        hosts = {str((row.get("provenance") or {}).get("host", "")) for row in rows}
        about = {"engine": engine, "cluster": cluster, "equal": equal, "hosts": hosts}
        lines.append(page.TABLES.record("machine", rows, **about))
    caption = "Cells that ran on real ranks, by engine and cluster"
    return page.DataTable("machines", caption, lines) if lines else None


def _cells(gathered: Gathered) -> dict[str, Any]:
    """The number of cells, their statuses, and the commits and versions of torch that made them."""
    rows = [cell.row for cell in gathered.cells]
    return {
        "cells": len(rows),
        "statuses": Counter(row["status"] for row in rows).most_common(),
        "made_by": {
            "from commit": _frequencies(page.dated(commit_of(row)) for row in rows),
            "with torch": _frequencies((row.get("provenance") or {}).get("torch") for row in rows),
        },
    }


def _frequencies(values: Iterable[str | None]) -> str:
    """The distinct values with their frequencies, the most frequent first; one value has no frequency."""
    counted = Counter(filter(None, values)).most_common()
    return counted[0][0] if len(counted) == 1 else ", ".join(f"{name}: {n} cells" for name, n in counted)


# -- the page of a paper ---------------------------------------------------------------------------------


def _pages_of_papers(gathered: Gathered) -> Iterator[page.Page]:
    """The pages paper-NAME.html for each paper, with the lines of its PAPER.csv."""
    for number, paper in enumerate(gathered.papers):
        about = paper.paper
        path = gathered.results / "reproduction" / f"{about.name}.csv"
        verdicts = [(source, verdict_on(paper.records_of(source))) for source in paper.sources]
        yield page.Page(
            f"paper-{about.name}.html",
            about.title,
            "paper.md",
            {
                "about": about,
                "was_run": bool(paper.findings.runs),
                "sources": [(source, verdict.word, counts(verdict)) for source, verdict in verdicts],
                "verdict": _verdicts(paper),
                "figure": gathered.figure(about.name, about.title),
                "scenarios": [_scenario(gathered, paper, each) for each in paper.in_order],
                "statuses": _STATUSES,
            },
            group="Papers",
            order=10 + number,
            summary=f"{about.label}, {about.source}: its tables and claims, compared with ours.",
            short_title=about.label,
            files={f"data/{path.name}": path.read_bytes()} if paper.findings.runs else {},
        )


def _verdicts(paper: PaperResults) -> page.DataTable | None:
    """A table of errors and verdicts, with a line for each published table and quantity, and for the claims,
    formulas and curves of each scenario; None if nothing was run."""
    if not paper.findings.runs:
        return None
    lines = []
    for scenario in paper.in_order:
        source = scenario.document.published_in
        for (what, variant), some in groups(paper.findings.of(scenario.name), "answer", "variant"):
            verdict = verdict_on(some)
            table, colon, quantity = what.partition(": ")
            compared = f"{table}{colon}{page.quantity_words(quantity)}"
            about = {"compared": f"{compared} ({variant})" if variant else compared}
            about["figure"] = f"{scenario.document.title}{f' ({source})' if source else ''}"
            lines.append(page.TABLES.record("compared", verdict, errors=errors_by_role(some), **about))
    caption = "What was compared, whether it reproduces, and the errors by role"
    return page.DataTable("verdict", caption, lines, percent=("median error",))


def _scenario(gathered: Gathered, paper: PaperResults, scenario: Scenario) -> dict[str, Any]:
    """The values that the page shows for a scenario, with the text of its file."""
    document, name, identifier = scenario.document, scenario.name, scenario.name.replace("_", "-")
    tables = []
    for number, (title, lines) in enumerate(paper.findings.blocks(name), start=1):
        # a title of one word, such as "claims", gets the scenario's title, because several scenarios have it
        caption = f"{title[:1].upper()}{title[1:]}" + f": {document.title}" * (" " not in title)
        heads = [head for head in lines[0] if any(line[head] not in (None, "") for line in lines)]
        # the error is the second column, so that a phone shows it
        heads = sorted(heads, key=lambda head: (head != heads[0], head != "relative error"))
        tables.append(
            page.DataTable(f"{identifier}-{number}", caption, lines, heads, sortable=len(lines) > _LONG)
        )
    settings = page.TABLES.records("inferred", document.inferred_from)
    caption = "Settings that were chosen by looking at published numbers"
    summary = f"The scenario, with the evidence for its settings: {document.title}"
    records = paper.findings.of(name)
    return {
        "name": name,
        "document": document,
        "run": paper.run_of(name),
        "errors": errors_by_role(records) if len(records) else "",
        "figure": gathered.figure(document.figure, document.title),
        "tables": tables,
        "settings": page.DataTable(f"{identifier}-inferred", caption, settings) if settings else None,
        "text": page.folded(summary, scenario.path.read_text(encoding="utf-8")),
    }
