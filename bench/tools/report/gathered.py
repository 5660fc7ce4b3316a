"""What the site is made of: papers and what reproducing them found, and a result row for each known cell.

Rows come from the first of these places that has any of a scenario: RESULTS/runs (every scenario that was
run here), RESULTS/baseline (committed rows of a few), and the numbers that RESULTS/reproduction/PAPER.csv
holds of cells that were measured elsewhere. The last have what was compared with published tables alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from pandas import DataFrame

import spbench
from spbench.bench.errors import UserError
from spbench.bench.measure import RESULTS_FILE, Scenario, flat, read_all_rows
from spbench.bench.measurement import Measured, Status
from spbench.bench.row import Row
from spbench.bench.tools.papers.answer import answers_of
from spbench.bench.tools.papers.answers.tables import PublishedTable
from spbench.bench.tools.papers.comparison import frame_of, lines_of, read_records
from spbench.bench.tools.papers.paper_findings import PaperFindings
from spbench.bench.tools.papers.reproductions import SIDE_BY_SIDE, STRATEGIES
from spbench.bench.tools.papers.sources import ALL, Paper, scenarios_of
from spbench.bench.tools.report.page import Figure

Line = Mapping[str, Any]
#: where a row was found
Origin = Literal["runs", "baseline", "reproduction"]


@dataclass(frozen=True)
class PaperResults:
    """A paper, its scenarios by name, and what reproducing them found.

    Attributes:
        findings: without lines where no PAPER.csv is among the results.
    """

    paper: Paper
    scenarios: Mapping[str, Scenario]
    findings: PaperFindings

    @property
    def sources(self) -> list[str]:
        """Where numbers of the scenarios were published: "" for the paper itself, first, then others that
        stand on its page."""
        return sorted({scenario.document.published_in for scenario in self.scenarios.values()})

    @property
    def in_order(self) -> list[Scenario]:
        """The paper's own scenarios, then scenarios of numbers from other papers."""
        return sorted(self.scenarios.values(), key=lambda scenario: scenario.document.published_in)

    def records_of(self, source: str) -> DataFrame:
        """The records of numbers that were published in ``source``."""
        return self.findings.of(*(s.name for s in self.in_order if s.document.published_in == source))

    def run_of(self, scenario: str) -> Mapping[str, str]:
        """The line of PAPER_runs.csv on a scenario; empty if it was not run."""
        return next((run for run in self.findings.runs if run["scenario"] == scenario), {})


@dataclass(frozen=True)
class CellResult:
    """The result of a cell, and where it is from.

    Attributes:
        row: as in a cells.jsonl; for the origin "reproduction", only the compared numbers.
    """

    scenario: str
    origin: Origin
    row: Row

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The row as one level of plain values, between the scenario's name and the origin."""
        return {"scenario": self.scenario, **flat(self.row), "origin": self.origin}


@dataclass(frozen=True)
class Gathered:
    """All that pages are made of.

    Attributes:
        results: the folder with reproduction/, baseline/ and runs/.
        baseline: the folder with a baseline of each of some scenarios.
        history: the folder of `spbench record`; None: there is none.
        strategy_rows: of the scenario that sets strategies beside each other, in its order.
        cells: by scenario, then in the order of the file.
    """

    results: Path
    baseline: Path
    history: Path | None
    papers: Sequence[PaperResults]
    cells: Sequence[CellResult]
    strategy_rows: Sequence[Row] = ()

    def figure(self, name: str | None, title: str) -> Figure | None:
        """A figure of the reproduction, as SVG or else as PNG; None where it was not drawn."""
        for form in ("svg", "png") if name else ():
            path = self.results / "reproduction" / "figures" / f"{name}.{form}"
            if path.is_file():
                return Figure(f"figures/{path.name}", path.read_bytes(), title)
        return None

    @property
    def strategies(self) -> Path:
        """The folder of strategies' rows and traces."""
        return self.results / "reproduction" / STRATEGIES


def default_results() -> Path:
    """results/ in the working directory, or else in the checkout of this code.

    Raises:
        UserError: neither has reproduced papers, baselines or runs.
    """
    places = [Path("results"), Path(spbench.__file__).resolve().parents[1] / "results"]
    for place in places:
        if any((place / name).is_dir() for name in ("reproduction", "baseline", "runs")):
            return place
    raise UserError(
        "there are no results here: run `spbench reproduce all`, or name a folder of results with --results"
    )


def gather(results: Path, history: Path | None, baseline: Path | None = None) -> Gathered:
    """Read everything that pages are made of.

    Args:
        results: a folder with any of reproduction/, baseline/ and runs/.
        history: of `spbench record`; None: RESULTS/history if that is there.
        baseline: a folder with baselines by the names of scenarios; None: RESULTS/baseline.

    Raises:
        UserError: a folder is missing, or a file in it cannot be read.
    """
    for option, folder, how in (
        ("--results", results, "`spbench reproduce all` makes results/"),
        ("--history", history, "`spbench record` makes one"),
        ("--baseline", baseline, "`spbench baseline` makes one"),
    ):
        if folder is not None and not folder.is_dir():
            raise UserError(f"{option} {folder} is not a folder; {how}")
    baseline = baseline or results / "baseline"
    if history is None and (results / "history").is_dir():
        history = results / "history"
    papers = [_paper(results / "reproduction", *each) for each in scenarios_of(ALL)]
    cells = list(_cells(baseline, results / "runs", papers))
    if not cells and not any(paper.findings.runs for paper in papers):
        raise UserError(f"{results} has no results; `spbench reproduce all` makes them")
    rows = read_all_rows(results / "reproduction" / STRATEGIES / SIDE_BY_SIDE)
    return Gathered(results, baseline, history, papers, cells, rows)


def _paper(folder: Path, paper: Paper, scenarios: Sequence[Scenario]) -> PaperResults:
    by_name = {scenario.name: scenario for scenario in scenarios}
    files = {folder / f"{paper.name}.csv": _COLUMNS, folder / f"{paper.name}_runs.csv": _RUN_COLUMNS}
    lines: Sequence[Line] = []
    runs: Sequence[Line] = []
    if any(file.exists() for file in files):
        lines, runs = (_checked(path, read_records(path), columns) for path, columns in files.items())
    documents = {name: scenario.document for name, scenario in by_name.items()}
    return PaperResults(paper, by_name, PaperFindings(paper.name, frame_of(lines), runs, documents))


#: columns of PAPER.csv and of PAPER_runs.csv that pages show
_COLUMNS = (
    *("table", "cell", "quantity", "role", "scenario"),
    *("published", "reproduced", "relative_error", "status_published", "status_reproduced"),
)
_RUN_COLUMNS = ("scenario", "cells", "commit", "torch")


def _checked(path: Path, records: Sequence[Line], columns: Sequence[str]) -> Sequence[Line]:
    missing = [name for name in columns if records and name not in records[0]]
    if missing:
        paper = path.stem.removesuffix("_runs")
        raise UserError(f"{path} has no column {missing[0]!r}; `spbench reproduce {paper}` writes it anew")
    return records


def _cells(baseline: Path, runs: Path, papers: Sequence[PaperResults]) -> Iterator[CellResult]:
    """The cells of every scenario, each scenario from the first place that has any."""
    places: dict[str, tuple[Origin, Path]] = {}
    origin: Origin
    for origin, folder in (("baseline", baseline), ("runs", runs)):  # the latter has precedence
        for path in sorted(folder.glob(f"*/{RESULTS_FILE}")):
            places[path.parent.name] = (origin, path)
    reproduced = {name: paper for paper in papers for name in paper.scenarios}
    for name in sorted({*places, *reproduced}):
        if name in places:
            origin, path = places[name]
            yield from (CellResult(name, origin, row) for row in read_all_rows(path))
        else:
            rows = _written_rows(reproduced[name], name)
            yield from (CellResult(name, "reproduction", row) for row in rows)


def _written_rows(paper: PaperResults, name: str) -> Iterator[Row]:
    """A row for each cell of a scenario that published tables have, with the compared numbers. PAPER.csv has
    these in the units of the comparison alone, so they are turned back into what was measured."""
    scenario, run = paper.scenarios[name], paper.run_of(name)
    columns = {
        (table.table, column): quantity
        for table in answers_of(scenario, PublishedTable)
        for column, quantity in table.by_name.items()
        if not quantity.of_classes
    }
    cells = {cell.key: cell for declared in scenario.cells.values() for cell in declared}
    rows: dict[str, Row] = {}
    for record in lines_of(paper.findings.of(name)):
        cell, quantity = cells.get(record.cell), columns.get((record.table_name, record.quantity))
        if cell is None or quantity is None:
            continue
        row = rows.setdefault(
            cell.key,
            Row(
                key=cell.key,
                cell=cell.model_dump(mode="json"),
                status=cast("Status", record.status_reproduced or "ok"),
                reason="",
                measurement=Measured(),
                provenance={"commit": run.get("commit", ""), "torch": run.get("torch", "")},
            ),
        )
        if record.reproduced is not None:
            setattr(row.measurement, quantity.field, quantity.measured(record.reproduced))
    yield from rows.values()
