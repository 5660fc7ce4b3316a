"""`spbench reproduce`: every scenario of a paper, each published number beside ours.

Writes, into the output folder, PAPER.csv (RECORDS: one line a number), PAPER_runs.csv (RUNS: one line a
scenario) and figures/. Cells are kept in results/runs, where `spbench run` keeps them too, so that a
command that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spbench.bench.commands import output as report
from spbench.bench.commands.run import Ran, draw_figure, run_cells
from spbench.bench.comparison import document as narrative
from spbench.bench.comparison.claims import Comparison, write_csv
from spbench.bench.comparison.papers import Paper, scenarios_of
from spbench.bench.config.scenario import Scenario
from spbench.bench.config.select import ALL as ALL_VARIANTS
from spbench.bench.config.select import Narrowing
from spbench.bench.engines.engine import run as run_on_engine
from spbench.bench.errors import UserError
from spbench.bench.sweep.crew import Crew
from spbench.bench.sweep.results import finite

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
        form: table, csv or json.
    """

    paper: str
    all_variants: bool
    jobs: int | None
    output: Path
    fresh: bool
    document: Path | None
    form: str

    def runs(self, scenario: Scenario) -> Path:
        """Where a scenario's cells are kept: with those of `spbench run`, or below another output."""
        above = Path("results") if self.output == FOLDER else self.output
        return above / "runs" / scenario.name


def reproduce(request: Reproduction) -> int:
    """Reproduce a paper, or all; returns the exit code.

    Raises:
        UserError: an unknown paper, a wrong scenario, or a file that cannot be written or lacks its markers.
    """
    code = 0
    with Crew(run_on_engine) as crew:
        for paper, scenarios in scenarios_of(request.paper):
            if request.document is not None:
                narrative.check_document(request.document, paper.name, [s.name for s in scenarios])
            found = _run(request, paper, scenarios, crew)
            if found is None:
                return 130
            code = max(code, found)
    return code


def _run(request: Reproduction, paper: Paper, scenarios: Sequence[Scenario], crew: Crew) -> int | None:
    records: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    drawn: list[Path] = []
    code = 0
    narrowing = Narrowing(variant=ALL_VARIANTS if request.all_variants else None)
    for scenario in scenarios:
        ran = run_cells(scenario, narrowing, request.runs(scenario), request.jobs, request.fresh, crew)
        if ran is None:
            return None
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
    read = narrative.Findings(paper.name, *(narrative.read_records(file) for file in files))
    if request.document is not None:
        files.append(narrative.write_document(request.document, read))
    _show(request.form, paper, scenarios, read, [*files, *drawn])
    return code


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

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return write_csv(DataFrame([dict(r) for r in records], columns=list(columns)), path)


def _show(
    form: str,
    paper: Paper,
    scenarios: Sequence[Scenario],
    found: narrative.Findings,
    files: Sequence[Path],
) -> None:
    if form == "json":
        content = {"paper": paper.name, "records": found.records, "runs": found.runs}
        print(json.dumps(finite({**content, "files": [str(path) for path in files]}), indent=1))
    elif form == "csv":
        sys.stdout.write(files[0].read_text())
    else:
        print(f"{paper.title} ({paper.source})\n")
        for scenario in scenarios:
            for title, lines in found.blocks(scenario.name):
                report.show_table(f"{scenario.name}: {title}", lines)
                print()
        report.show_table("Summary", found.summary())
        print()
    for path in files:
        print(path, file=sys.stdout if form == "table" else sys.stderr)
