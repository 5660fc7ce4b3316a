"""`spbench reproduce`: every scenario of a paper, each published number beside ours.

Writes, into the output folder, PAPER.csv (RECORDS: one line a number), PAPER_runs.csv (RUNS: one line a
scenario) and figures/. Cells are kept in results/runs, where `spbench run` keeps them too, so that a
command that was interrupted goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spbench.bench.commands.execution import Ran, draw_figure, draw_records, opened_executor, run_cells
from spbench.bench.commands.options import executor, fresh, jobs, output_folder, printed
from spbench.bench.commands.output import Output, Table

if TYPE_CHECKING:
    from spbench.bench.config.scenario import Scenario
    from spbench.bench.published.compared import Comparison
    from spbench.bench.reproduction.findings import Findings
    from spbench.bench.reproduction.papers import Paper
    from spbench.bench.sweep.results import Row
    from spbench.bench.workers.crew import Crew
    from spbench.bench.workers.executor import Executor

FOLDER = Path("results", "reproduction")

#: columns of PAPER.csv; the last four say where a number comes from
RECORDS = (
    *("table", "cell", "strategy", "quantity", "published", "reproduced", "relative_error"),
    *("status_published", "status_reproduced", "role", "scenario", "variant", "note", "source"),
)
#: columns of PAPER_runs.csv; cell_seconds is the sum over cells, however many ran at a time
RUNS = ("scenario", "cells", "ok", "oom", "unsupported", "failed", "cell_seconds", "torch", "commit")


@dataclass(frozen=True)
class Reproduction:
    """What `spbench reproduce` was asked for.

    Attributes:
        executor: the address of one that runs cells on other machines; None: all run here.
        output: folder of the CSV files and figures.
        write: write the generated parts of REPRODUCE.md and of the paper's details anew.
    """

    paper: str
    all_variants: bool
    jobs: int | None
    executor: str | None
    output: Path
    fresh: bool
    write: bool

    def runs(self, scenario: Scenario) -> Path:
        """Where a scenario's cells are kept: with those of `spbench run`, or below another output."""
        above = Path("results") if self.output == FOLDER else self.output
        return above / "runs" / scenario.name


@click.command("reproduce")
@click.argument("paper")
@click.option("--all-variants", is_flag=True, help="Every variant of the scenarios' settings, not the first.")
@jobs
@executor
@output_folder("Folder for results; default results/reproduction.")
@fresh
@click.option("--write", is_flag=True, help="Write the generated parts of REPRODUCE.md and its details anew.")
@printed
def command(
    paper: str,
    all_variants: bool,
    jobs: int | None,
    executor: str | None,
    output: Path | None,
    fresh: bool,
    write: bool,
) -> Iterator[Output]:
    """Run every scenario of PAPER (rsa, lasp, dsp, measured or all), each published number beside ours.

    Cells are kept in results/runs: what was interrupted goes on where it was.
    """
    return reproduce(Reproduction(paper, all_variants, jobs, executor, output or FOLDER, fresh, write))


def reproduce(request: Reproduction) -> Iterator[Output]:
    """Reproduce a paper, or all: the report of each as soon as its cells have run.

    Raises:
        UserError: an unknown paper, a wrong scenario, a document that lacks a part, a file that cannot be
            written, or results that the documents may not have (see :func:`check_same_code`).
    """
    from spbench.bench.engines.engine import run as run_on_engine
    from spbench.bench.reproduction.document import Pages
    from spbench.bench.reproduction.papers import scenarios_of
    from spbench.bench.workers.crew import Crew

    papers = scenarios_of(request.paper)
    for paper, scenarios in papers if request.write else ():
        Pages.of(paper.name).check(paper.name, [s.name for s in scenarios])
    with Crew(run_on_engine) as crew, opened_executor(request.executor) as executor:
        for paper, scenarios in papers:
            yield _run(request, paper, scenarios, crew, executor)


def _run(
    request: Reproduction,
    paper: Paper,
    scenarios: Sequence[Scenario],
    crew: Crew,
    executor: Executor | None,
) -> Output:
    from spbench.bench.config.select import ALL, Narrowing
    from spbench.bench.reproduction.document import Pages
    from spbench.bench.reproduction.findings import Findings, read_records
    from spbench.bench.sweep.provenance import check_same_code

    records: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    rows: dict[str, list[Row]] = {}
    drawn: list[Path] = []
    code = 0
    narrowing = Narrowing(variant=ALL if request.all_variants else None)
    for scenario in scenarios:
        folder = request.runs(scenario)
        ran = run_cells(scenario, narrowing, folder, request.jobs, request.fresh, crew, executor)
        rows[scenario.name] = ran.rows
        if request.write:
            check_same_code(rows)
        paths, figure_failed = draw_figure(scenario, ran, request.output / "figures")
        drawn += paths
        code = 1 if ran.failed() or figure_failed else code
        # our own closed forms are in comparison.csv too, as sent_bytes: nobody has published them
        published = [entry for entry in ran.comparisons if entry.quantity != "sent_bytes"]
        records += [record(scenario.name, entry) for entry in published]
        runs.append(run_record(scenario.name, ran))
    files = [
        write_records(records, RECORDS, request.output / f"{paper.name}.csv"),
        write_records(runs, RUNS, request.output / f"{paper.name}_runs.csv"),
    ]
    # what is printed and written comes from the files, as it will when they are read again
    documents = {scenario.name: scenario.document for scenario in scenarios}
    lines = [read_records(file) for file in files]
    read = Findings(paper.name, lines[0], lines[1], documents)
    if request.write:
        files += Pages.of(paper.name).write(read)
    paths, figure_failed = draw_records(paper.name, read.records, request.output / "figures")
    drawn += paths
    code = 1 if figure_failed else code
    return _report(paper, scenarios, read, [*files, *drawn], code)


def record(scenario: str, entry: Comparison) -> dict[str, Any]:
    """A line of PAPER.csv. A claim is a table of one number, under its own name."""
    fields: dict[str, Any] = {name: getattr(entry, name, None) for name in RECORDS}
    return {**fields, "table": entry.table or entry.claim, "scenario": scenario}


def run_record(scenario: str, ran: Ran) -> dict[str, Any]:
    """A line of PAPER_runs.csv."""
    counts = Counter(row["status"] for row in ran.rows)
    made = [row.get("provenance") or {} for row in ran.rows]
    return {
        "scenario": scenario,
        "cells": len(ran.rows),
        **{status: counts[status] for status in ("ok", "oom", "unsupported")},
        "failed": sum(counts[status] for status in counts.keys() - {"ok", "oom", "unsupported"}),
        "cell_seconds": round(sum(row.get("elapsed_s") or 0 for row in ran.rows)),
        **{
            name: " ".join(sorted({str(by.get(name)) for by in made if by.get(name)}))
            for name in ("torch", "commit")
        },
    }


def write_records(records: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> Path:
    """Write a CSV file whole or not at all, and return its path; UserError if it cannot be written."""
    from pandas import DataFrame

    from spbench.bench.reproduction.comparisons import write_csv

    return write_csv(DataFrame([dict(r) for r in records], columns=list(columns)), path)


def _report(
    paper: Paper, scenarios: Sequence[Scenario], found: Findings, files: Sequence[Path], code: int
) -> Output:
    from spbench.bench.sweep.results import finite

    sections: list[Table | str] = [f"{paper.title} ({paper.source})"]
    for scenario in scenarios:
        for title, lines in found.blocks(scenario.name):
            sections.append(Table(f"{scenario.name}: {title}", lines))
    sections.append(Table("Verdict", found.verdict()))
    content = {"paper": paper.name, "records": found.records, "runs": found.runs}
    content["files"] = [str(path) for path in files]
    return Output(sections, finite(content), found.records, RECORDS, files=files, code=code)
