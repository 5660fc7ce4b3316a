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

from spbench.bench.commands.execution import Ran, draw_figure, run_cells
from spbench.bench.commands.options import fresh, jobs, output_folder, reported
from spbench.bench.commands.report import Report, Table

if TYPE_CHECKING:
    from spbench.bench.comparison.claims import Comparison
    from spbench.bench.comparison.document import Findings
    from spbench.bench.comparison.papers import Paper
    from spbench.bench.config.scenario import Scenario
    from spbench.bench.sweep.crew import Crew

FOLDER = Path("results", "reproduction")

#: columns of PAPER.csv; the last three say where a number comes from
RECORDS = (
    *("table", "cell", "strategy", "quantity", "published", "reproduced", "relative_error"),
    *("status_published", "status_reproduced", "role", "scenario", "variant", "note"),
)
#: columns of PAPER_runs.csv; cell_seconds is the sum over cells, however many ran at a time
RUNS = ("scenario", "cells", "ok", "oom", "unsupported", "failed", "cell_seconds", "torch", "commit")


@dataclass(frozen=True)
class Reproduction:
    """What `spbench reproduce` was asked for.

    Attributes:
        output: folder of the CSV files and figures.
        document: a text whose generated parts are written anew; None: leave it.
    """

    paper: str
    all_variants: bool
    jobs: int | None
    output: Path
    fresh: bool
    document: Path | None

    def runs(self, scenario: Scenario) -> Path:
        """Where a scenario's cells are kept: with those of `spbench run`, or below another output."""
        above = Path("results") if self.output == FOLDER else self.output
        return above / "runs" / scenario.name


@click.command("reproduce")
@click.argument("paper")
@click.option("--all-variants", is_flag=True, help="Every variant of the scenarios' settings, not the first.")
@jobs
@output_folder("Folder for results; default results/reproduction.")
@fresh
@click.option("--write", is_flag=True, help="Write the generated parts of REPRODUCE.md anew.")
@reported
def command(
    paper: str, all_variants: bool, jobs: int | None, output: Path | None, fresh: bool, write: bool
) -> Iterator[Report]:
    """Run every scenario of PAPER (rsa, lasp, dsp, or all) and set each published number beside ours.

    Cells are kept in results/runs: what was interrupted goes on where it was.
    """
    document = Path("REPRODUCE.md") if write else None
    return reproduce(Reproduction(paper, all_variants, jobs, output or FOLDER, fresh, document))


def reproduce(request: Reproduction) -> Iterator[Report]:
    """Reproduce a paper, or all: the report of each as soon as its cells have run.

    Raises:
        UserError: an unknown paper, a wrong scenario, or a file that cannot be written or lacks its markers.
    """
    from spbench.bench.comparison.document import check_document
    from spbench.bench.comparison.papers import scenarios_of
    from spbench.bench.engines.engine import run as run_on_engine
    from spbench.bench.sweep.crew import Crew

    with Crew(run_on_engine) as crew:
        for paper, scenarios in scenarios_of(request.paper):
            if request.document is not None:
                check_document(request.document, paper.name, [s.name for s in scenarios])
            yield _run(request, paper, scenarios, crew)


def _run(request: Reproduction, paper: Paper, scenarios: Sequence[Scenario], crew: Crew) -> Report:
    from spbench.bench.comparison.document import Findings, read_records, write_document
    from spbench.bench.config.select import ALL, Narrowing

    records: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    drawn: list[Path] = []
    code = 0
    narrowing = Narrowing(variant=ALL if request.all_variants else None)
    for scenario in scenarios:
        ran = run_cells(scenario, narrowing, request.runs(scenario), request.jobs, request.fresh, crew)
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
    read = Findings(paper.name, *(read_records(file) for file in files))
    if request.document is not None:
        files.append(write_document(request.document, read))
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

    from spbench.bench.comparison.claims import write_csv
    from spbench.bench.errors import UserError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return write_csv(DataFrame([dict(r) for r in records], columns=list(columns)), path)


def _report(
    paper: Paper, scenarios: Sequence[Scenario], found: Findings, files: Sequence[Path], code: int
) -> Report:
    from spbench.bench.sweep.results import finite

    sections: list[Table | str] = [f"{paper.title} ({paper.source})"]
    for scenario in scenarios:
        for title, lines in found.blocks(scenario.name):
            sections.append(Table(f"{scenario.name}: {title}", lines))
    sections.append(Table("Summary", found.summary()))
    content = {"paper": paper.name, "records": found.records, "runs": found.runs}
    content["files"] = [str(path) for path in files]
    return Report(sections, finite(content), found.records, RECORDS, files=files, code=code)
