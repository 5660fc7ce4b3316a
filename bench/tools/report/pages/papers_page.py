"""A page for each paper: its tables and claims beside ours, what is not met, and the scenarios' own text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.tools.papers.paper_findings import Record, by_answer, errors_by_role
from spbench.bench.tools.report.gathered import Gathered, PaperResults
from spbench.bench.tools.report.page import DataTable, Figure, Page
from spbench.bench.tools.report.published_tables import tables_of
from spbench.bench.tools.report.report_verdict import counts, verdict_on


@dataclass(frozen=True)
class ScenarioPart:
    """What the page shows of a scenario.

    Attributes:
        run: its line of PAPER_runs.csv; None if it was not run.
        errors: of all its numbers by role.
        inferred: the settings that were chosen by looking at published numbers, and why.
        text: of the scenario's file.
    """

    scenario: Scenario
    run: Record | None
    errors: str
    figure: Figure | None
    tables: Sequence[DataTable]
    inferred: DataTable | None
    text: str


def pages(gathered: Gathered) -> Iterator[Page]:
    """paper-NAME.html for each paper."""
    for number, paper in enumerate(gathered.papers):
        parts = [_part(gathered, paper, scenario) for scenario in _in_order(paper)]
        overall = verdict_on(paper.records_of("")) if paper.findings else None
        others = [(source, verdict_on(paper.records_of(source))) for source in paper.sources if source]
        yield Page(
            f"paper-{paper.paper.name}.html",
            paper.paper.title,
            "paper.html",
            {
                "paper": paper,
                "parts": parts,
                "figure": gathered.figure(paper.paper.name),
                "overall": overall,
                "counts": counts(overall) if overall else "",
                "others": [(source, verdict.word, counts(verdict)) for source, verdict in others],
                "verdict": _verdicts(paper),
            },
            group="Papers",
            order=10 + number,
            summary=f"{paper.paper.label}, {paper.paper.source}: its tables and claims beside ours.",
            short_title=paper.paper.label,
        )


def _in_order(paper: PaperResults) -> list[Scenario]:
    """The paper's own scenarios first, then those of numbers from others."""
    return [scenario for source in paper.sources for scenario in paper.of_source(source).values()]


def _verdicts(paper: PaperResults) -> DataTable | None:
    """A line for each table and quantity, and for the claims, formulas and curves of a scenario."""
    if paper.findings is None:
        return None
    lines = []
    for scenario in _in_order(paper):
        name, source = scenario.name, scenario.document.published_in
        records = [record for record in paper.findings.records if record["scenario"] == name]
        for (what, variant), some in by_answer(records).items():
            verdict = verdict_on(some)
            lines.append(
                {
                    "compared": f"{what} ({variant})" if variant else what,
                    "median error": verdict.median,
                    "reproduces": verdict.word if verdict.judged else "not judged",
                    "met": f"{verdict.met} of {verdict.judged}" if verdict.judged else "",
                    "errors by role": errors_by_role(some),
                    "figure or table": f"{scenario.document.title}{f' ({source})' if source else ''}",
                }
            )
    caption = "What was compared, whether it reproduces, and the errors by role"
    return DataTable("verdict", caption, lines, percent=("median error",))


def _part(gathered: Gathered, paper: PaperResults, scenario: Scenario) -> ScenarioPart:
    runs = paper.findings.runs if paper.findings else []
    records = [r for r in paper.findings.records if r["scenario"] == scenario.name] if paper.findings else []
    return ScenarioPart(
        scenario,
        next((run for run in runs if run["scenario"] == scenario.name), None),
        errors_by_role(records) if records else "",
        gathered.figure(scenario.document.figure),
        list(tables_of(gathered, scenario, records)),
        _inferred(scenario),
        scenario.path.read_text(encoding="utf-8"),
    )


def _inferred(scenario: Scenario) -> DataTable | None:
    lines = [
        {
            "setting": one.setting,
            "chosen by looking at": ", ".join([*one.answers, *one.quantities]),
            "why": " ".join(one.reason.split()),
        }
        for one in scenario.document.inferred_from
    ]
    caption = "Settings that were chosen by looking at published numbers"
    return DataTable(f"{scenario.name}-inferred".replace("_", "-"), caption, lines) if lines else None
