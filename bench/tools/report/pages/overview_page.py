"""The first page: whether papers reproduce and what changed; then errors, machines, and which method is the
best at each sequence length and number of GPUs, of those that were measured alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.measure import commit_of, engine_classes
from spbench.bench.row import Row
from spbench.bench.tools.papers.paper_findings import counts, distinct, role_errors, verdict_on
from spbench.bench.tools.papers.sources import MEASURED
from spbench.bench.tools.papers.validation import records_by_source, validation_lines
from spbench.bench.tools.report import report_markdown as md
from spbench.bench.tools.report.gathered import CellResult, Gathered, PaperResults
from spbench.bench.tools.report.page import DataTable, Page, Part
from spbench.bench.tools.report.what_changed import changes
from spbench.bench.units import GIB
from spbench.plots.series import gpus, grouped, settings, strategy
from spbench.plots.style import strategy_name

#: lines of the table of errors on the page
_MOST_ERRORS = 100


def pages(gathered: Gathered) -> Iterator[Page]:
    """index.html."""
    parts = {
        "papers": md.listed(map(_sentence, gathered.papers)),
        "changes": md.listed(changes(gathered)),
        "errors": [_by_role(gathered), _errors(gathered)],
        "measured": _measured(gathered),
        "best": _best(gathered),
        "machines": _machines(gathered),
        "cells": _cells(gathered),
    }
    title = "Sequence parallelism, reproduced"
    yield Page("index.html", title, "overview.md", parts, order=0, short_title="Overview")


def _sentence(paper: PaperResults) -> str:
    """Whether a paper reproduces, and why, in numbers; and what is known of others on its page."""
    about, path = paper.paper, f"paper-{paper.paper.name}.html"
    records = paper.records_of("")
    verdict = verdict_on(records)
    text = f"{md.link(about.label, path)} {md.BADGES[verdict.word]}: "
    if verdict.word == "not run":
        return text + f"{md.code(f'spbench reproduce {about.name}')} does it."
    text += f"{counts(verdict)}."
    if about.finding:
        text += f" {about.finding}"
    elif misses := md.most_misses(records):
        title = paper.scenarios[misses[0]].document.title if misses[0] in paper.scenarios else misses[0]
        text += f" Most misses: {md.link(title, f'{path}#{misses[0]}')} ({misses[1]})."
    others = ((source, verdict_on(paper.records_of(source))) for source in paper.sources if source)
    return text + "".join(f" On its page too, {md.plain(source)}: {counts(of)}." for source, of in others)


def _by_role(gathered: Gathered) -> DataTable | None:
    """A line for each paper and role."""
    lines = []
    for paper in gathered.papers:
        for of in role_errors(paper.records):
            verdict = verdict_on([record for record in paper.records if record.role == of.role])
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


def _errors(gathered: Gathered) -> DataTable | None:
    """The error of every published number that is no closed form, the largest first."""
    lines = [
        {
            "where": f"{paper.paper.label}: {record.table}",
            "error": record.relative_error,
            "published": record.published,
            "ours": record.reproduced,
            "quantity": md.quantity_words(record.quantity),
            **{name: getattr(record, name) for name in ("role", "cell")},
        }
        for paper in gathered.papers
        for record in distinct(paper.records)
        if record.relative_error is not None and record.role != "formula"
    ]
    lines.sort(key=lambda line: -abs(line["error"]))
    caption = (
        f"The {_MOST_ERRORS} largest relative errors, closed forms left out; the CSV has all {len(lines):,}"
    )
    if not lines:
        return None
    return DataTable("errors", caption, lines, sortable=True, percent=("error",), most=_MOST_ERRORS)


def _measured(gathered: Gathered) -> Iterator[Part]:
    """The table of README.md, errors by who measured beside those of other predictors; then each number."""
    records = [
        record for paper in gathered.papers if paper.paper.name == MEASURED for record in paper.records
    ]
    if not records:
        yield "No measurement of a real machine was compared: `spbench reproduce measured` does it."
        return
    yield f"""What others measured on real GPUs, with every setting, beside what virtual ranks predict. Errors
are \\|ours / measured - 1\\|. Other predictors are listed with their errors on the same runs where their
predictions are public, and else with what their authors state. [All numbers.](paper-{MEASURED}.html)"""
    heads = ["quantity", "median error", "worst", "measured by, on", "numbers", "role", "other predictors"]
    caption = "Errors against real machines, ours and other predictors'"
    yield DataTable("validation", caption, validation_lines(records), heads)
    yield gathered.figure(MEASURED, "ours beside what real machines measured")
    lines = [
        {
            "what": f"{source.measured_by}: {record.label}",
            "error": record.relative_error,
            "measured": record.published,
            "ours": record.reproduced,
            "quantity": md.quantity_words(record.quantity),
            "role": record.role,
            "note": record.note,
        }
        for source, some in records_by_source(records).items()
        for record in some
    ]
    caption = f"Ours beside what real machines measured, the first {_MOST_ERRORS} of {len(lines)}"
    yield DataTable("measured", caption, lines, sortable=True, percent=("error",), most=_MOST_ERRORS)


def _best(gathered: Gathered) -> list[Part]:
    best = "The best method by sequence length and GPUs, of those measured alike"
    longest = "The method with the longest sequence that fits, by batch and GPUs"
    tables = [
        best_table("best", best, gathered.cells, BY_LENGTH, "seq_len"),
        best_table("longest", longest, gathered.cells, BY_BATCH, "batch"),
    ]
    missing = "No cell has a speed, a memory or an answer: `spbench reproduce all` measures them."
    return [*tables] if any(tables) else [missing]


def _machines(gathered: Gathered) -> Iterator[Part]:
    """A line for each engine and cluster whose numbers are measured, not computed."""
    exact = {name for name, engine in engine_classes().items() if engine.is_exact}
    measured = [c.row for c in gathered.cells if c.row["cell"].get("engine", "virtual") not in exact]
    if not measured:
        yield """No cell of these results ran on real ranks: `spbench run --scenario communication` has some
that need no GPU."""
        return
    yield """Times and memory of other cells come from virtual ranks; those here were measured, and their
bytes counted."""
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
    yield DataTable("machines", "Cells that ran on real ranks, by engine and cluster", lines)


def _equals_closed_form(row: Mapping[str, Any]) -> bool:
    measured = row["measurement"]
    return bool(measured.get("communication")) and not measured.get("formula_difference")


def _cells(gathered: Gathered) -> str:
    """How many cells there are, how they ended, and what made them."""
    counted = Counter(cell.row["status"] for cell in gathered.cells).most_common()
    statuses = ", ".join(f"{n} {'out of memory' if status == 'oom' else status}" for status, n in counted)
    commits = _named(md.dated(commit_of(cell.row)) for cell in gathered.cells)
    torches = _named((cell.row.get("provenance") or {}).get("torch") for cell in gathered.cells)
    by = [f"from commit {md.plain(commits)}"] * bool(commits)
    by += [f"with torch {md.plain(torches)}"] * bool(torches)
    return md.listed([f"{len(gathered.cells)} cells: {statuses}", *by])


def _named(values: Iterable[str | None]) -> str:
    """The values with how often they occur, the most frequent first; without counts if there is one."""
    counted = Counter(filter(None, values)).most_common()
    return counted[0][0] if len(counted) == 1 else ", ".join(f"{name}: {n} cells" for name, n in counted)


@dataclass(frozen=True)
class MethodQuestion:
    """What is asked of cells, and what the answer is.

    Attributes:
        title: as readers see it.
        field: of the measurement.
        unit: of the shown value, which is the measured one divided by ``divisor``.
        searched: only searches for this quantity; empty: only cells that measure a step.
    """

    title: str
    field: str
    unit: str
    divisor: float = 1
    bigger: bool = True
    searched: str = ""


BY_LENGTH = (
    MethodQuestion("fastest", "tokens_per_s", "tokens/s"),
    MethodQuestion("smallest peak memory", "peak_memory_bytes", "GiB", GIB, bigger=False),
    MethodQuestion("largest batch that fits", "answer", "sequences", searched="batch"),
)
BY_BATCH = (MethodQuestion("longest sequence that fits", "answer", "tokens", searched="seq_len"),)

#: cells are alike that share these and their sizes, beside their place
_ALIKE = ("batch", "precision", "variant", "engine", "step")

#: a row and its settings
_Entry = tuple[Row, Mapping[str, Any]]


def best_table(
    name: str, caption: str, cells: Sequence[CellResult], questions: Sequence[MethodQuestion], along: str
) -> DataTable | None:
    """The best method at each place where any of the questions has an answer.

    Args:
        along: seq_len or batch.

    Returns None if no cell answers any of the questions.
    """
    lines = [line for question in questions for line in _best_lines(cells, question, along)]
    return DataTable(name, f"{caption}, {len(lines)} places", lines, sortable=True) if lines else None


def _best_lines(
    cells: Sequence[CellResult], question: MethodQuestion, along: str
) -> Iterator[dict[str, Any]]:
    """A line for each place: the best method, and what it was compared with."""
    places: dict[tuple[Any, ...], list[_Entry]] = {}
    for cell in cells:
        row, of = cell.row, cell.row["cell"]
        searched = (of.get("search") or {}).get("quantity", "")
        is_asked = searched == question.searched or (
            not question.searched and question.field == "tokens_per_s"
        )
        if row["status"] in ("ok", "oom") and of.get(along) is not None and is_asked:
            place = (of["model"], of["cluster"], gpus(row), of[along])
            places.setdefault(place, []).append((row, settings(row)))
    for (model, cluster, ranks, place), entries in sorted(places.items()):
        alike = _most_compared(entries, question)
        values = _by_method(alike, question)
        lost = {strategy(row) for row, _ in alike if row["status"] == "oom"} - values.keys()
        if not values and any(row["status"] == "ok" for row, _ in entries):
            continue  # nothing was measured of what is asked
        ranked = sorted(values.items(), key=lambda item: item[1], reverse=question.bigger)
        row, common = alike[0]
        yield {
            "metric": question.title,
            "model": model,
            "cluster": cluster,
            "GPUs": ranks,
            "sequence length": place if along == "seq_len" else None,
            "batch": common["batch"] if common["batch"] is not None else "largest that fits",
            "precision": common["precision"],
            "sizes": ", ".join(f"{name} {value}" for name, value in _sizes(row)),
            "best method": strategy_name(ranked[0][0]) if ranked else None,
            "value": ranked[0][1] / question.divisor if ranked else None,
            "unit": question.unit,
            "compared with": ", ".join(strategy_name(method) for method, _ in ranked[1:]),
            "second": ranked[1][1] / question.divisor if len(ranked) > 1 else None,
            "out of memory": ", ".join(map(strategy_name, sorted(lost))),
        }


def _most_compared(entries: Sequence[_Entry], question: MethodQuestion) -> Sequence[_Entry]:
    """The entries that are alike: of the whole model if there are any, then with the most methods, then with
    the largest batch."""

    def key(entry: _Entry) -> tuple[Any, ...]:
        row, of = entry
        return _sizes(row), *(of.get(name) for name in _ALIKE)

    def rank(item: tuple[tuple[Any, ...], list[_Entry]]) -> tuple[Any, ...]:
        (sizes, batch, *others), some = item
        methods = len(_by_method(some, question)), len({strategy(row) for row, _ in some})
        return -len(sizes), *methods, batch or 0, str((sizes, others))

    answering = [
        (row, of)
        for row, of in entries
        if row["status"] == "oom" or row["measurement"].get(question.field) is not None
    ]
    return max(grouped(answering, key).items(), key=rank)[1] if answering else entries


def _sizes(row: Row) -> tuple[tuple[str, Any], ...]:
    """The options that make the model another one, as fewer layers do: numbers and flags. Words choose how
    it is computed, which methods may differ in."""
    options = row["cell"].get("model_options") or {}
    numbers = {name: value for name, value in sorted(options.items()) if not isinstance(value, str)}
    return tuple((name, str(value) if isinstance(value, list) else value) for name, value in numbers.items())


def _by_method(entries: Sequence[_Entry], question: MethodQuestion) -> dict[str, float]:
    """The best value of each method that has any."""
    values: dict[str, list[float]] = {}
    for row, _ in entries:
        value = row["measurement"].get(question.field) if row["status"] == "ok" else None
        if value is not None:
            values.setdefault(strategy(row), []).append(value)
    return {method: (max if question.bigger else min)(of) for method, of in values.items()}
