"""A page for each paper: its tables and claims beside ours, what is not met, and the scenarios' own text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.measure import Scenario
from spbench.bench.tools.papers.comparison import groups
from spbench.bench.tools.papers.paper_findings import counts, errors_by_role, verdict_on
from spbench.bench.tools.report.gathered import Gathered, PaperResults
from spbench.bench.tools.report.page import DataTable, Page, folded, quantity_words

_LONG = 12
_STATUSES = {"ok": "ok", "oom": "out of memory", "unsupported": "unsupported", "failed": "failed"}


def pages(gathered: Gathered) -> Iterator[Page]:
    """The pages paper-NAME.html for each paper, with the lines of its PAPER.csv."""
    for number, paper in enumerate(gathered.papers):
        about = paper.paper
        path = gathered.results / "reproduction" / f"{about.name}.csv"
        verdicts = [(source, verdict_on(paper.records_of(source))) for source in paper.sources]
        yield Page(
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
            summary=f"{about.label}, {about.source}: its tables and claims beside ours.",
            short_title=about.label,
            files={f"data/{path.name}": path.read_bytes()} if paper.findings.runs else {},
        )


def _verdicts(paper: PaperResults) -> DataTable | None:
    """A line for each table and quantity, and for the claims, formulas and curves of a scenario."""
    if not paper.findings.runs:
        return None
    lines = []
    for scenario in paper.in_order:
        source = scenario.document.published_in
        for (what, variant), some in groups(paper.findings.of(scenario.name), "answer", "variant"):
            verdict = verdict_on(some)
            table, colon, quantity = what.partition(": ")
            compared = f"{table}{colon}{quantity_words(quantity)}"
            lines.append(
                {
                    "compared": f"{compared} ({variant})" if variant else compared,
                    "median error": verdict.median,
                    "reproduces": verdict.word if verdict.judged else "not judged",
                    "met": f"{verdict.met} of {verdict.judged}" if verdict.judged else "",
                    "errors by role": errors_by_role(some),
                    "figure or table": f"{scenario.document.title}{f' ({source})' if source else ''}",
                }
            )
    caption = "What was compared, whether it reproduces, and the errors by role"
    return DataTable("verdict", caption, lines, percent=("median error",))


def _scenario(gathered: Gathered, paper: PaperResults, scenario: Scenario) -> dict[str, Any]:
    """The values that the page shows for a scenario, with the text of its file."""
    document, name = scenario.document, scenario.name
    tables = []
    for number, (title, lines) in enumerate(paper.findings.blocks(name), start=1):
        # such as "claims", which several scenarios have
        caption = f"{title[:1].upper()}{title[1:]}" + f": {document.title}" * (" " not in title)
        heads = _error_second(lines)
        tables.append(
            DataTable(f"{_identifier(name)}-{number}", caption, lines, heads, sortable=len(lines) > _LONG)
        )
    settings = [
        {
            "setting": one.setting,
            "chosen by looking at": ", ".join([*one.answers, *one.quantities]),
            "why": " ".join(one.reason.split()),
        }
        for one in document.inferred_from
    ]
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
        "settings": DataTable(f"{_identifier(name)}-inferred", caption, settings) if settings else None,
        "text": folded(summary, scenario.path.read_text(encoding="utf-8")),
    }


def _identifier(scenario: str) -> str:
    return scenario.replace("_", "-")


def _error_second(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns in which anything stands; the error is the second, where a phone shows it."""
    heads = [head for head in lines[0] if any(line[head] not in (None, "") for line in lines)]
    return sorted(heads, key=lambda head: (head != heads[0], head != "relative error"))
