"""The data that the site shows: papers with the outcomes of reproducing them, and a result row for each cell.

The rows of a scenario come from the first of these places that has any: RESULTS/runs (every scenario that was
run here), RESULTS/baseline (committed rows of a few scenarios), and RESULTS/reproduction/PAPER.csv (of cells
that were measured elsewhere, only the numbers that published tables have).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from pandas import DataFrame

import spbench
from spbench.bench.command_line.record_forms import flat
from spbench.bench.errors import UserError
from spbench.bench.measure import RESULTS_FILE, Scenario, read_all_rows
from spbench.bench.measurement import Measured, Status
from spbench.bench.row import Row
from spbench.bench.tools.papers.answer import answers_of
from spbench.bench.tools.papers.answers.tables import PublishedTable
from spbench.bench.tools.papers.comparison import frame_of, lines_of, read_records
from spbench.bench.tools.papers.paper_findings import PaperFindings
from spbench.bench.tools.papers.reproductions import SIDE_BY_SIDE, STRATEGIES
from spbench.bench.tools.papers.sources import ALL, Paper, scenarios_of
from spbench.bench.tools.report.page import TABLES, Figure

Line = Mapping[str, Any]
#: the place that a row was read from
Origin = Literal["runs", "baseline", "reproduction"]


@dataclass(frozen=True)
class PaperResults:
    """A paper, its scenarios by name, and the outcomes of reproducing them.

    Attributes:
        findings: the compared numbers; none if the results have no PAPER.csv.
    """

    paper: Paper
    scenarios: Mapping[str, Scenario]
    findings: PaperFindings

    @property
    def sources(self) -> list[str]:
        """The sources in which the scenarios' numbers were published: "" for the paper itself comes first,
        then other papers, whose numbers are on this paper's page."""
        return sorted({scenario.document.published_in for scenario in self.scenarios.values()})

    @property
    def in_order(self) -> list[Scenario]:
        """The scenarios with the paper's own numbers, then those with numbers from other papers."""
        return sorted(self.scenarios.values(), key=lambda scenario: scenario.document.published_in)

    def records_of(self, source: str) -> DataFrame:
        """The records of comparisons with numbers that were published in ``source``, one a row."""
        return self.findings.of(*(s.name for s in self.in_order if s.document.published_in == source))

    def run_of(self, scenario: str) -> Mapping[str, str]:
        """The line of PAPER_runs.csv on a scenario; empty if it was not run."""
        return next((run for run in self.findings.runs if run["scenario"] == scenario), {})


@dataclass(frozen=True)
class CellResult:
    """The result of a cell, with its scenario and the place that it was read from.

    Attributes:
        row: a row of a cells.jsonl; for the origin "reproduction", it has only the compared numbers.
    """

    scenario: str
    origin: Origin
    row: Row

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The row as one level of plain values by column, with the columns ``scenario`` and ``origin``."""
        return {"scenario": self.scenario, **flat(self.row), "origin": self.origin}


@dataclass(frozen=True)
class Gathered:
    """All data that pages show.

    Attributes:
        results: the folder with reproduction/, baseline/ and runs/.
        baseline: the folder with baselines of some scenarios, each in a folder of the scenario's name.
        history: the folder of `spbench record`; None: there is no history.
        strategy_rows: the rows of the scenario that compares strategies, in its order.
        cells: the results of all cells, by scenario, then in the order of the file.
    """

    results: Path
    baseline: Path
    history: Path | None
    papers: Sequence[PaperResults]
    cells: Sequence[CellResult]
    strategy_rows: Sequence[Row] = ()

    def figure(self, name: str | None, title: str) -> Figure | None:
        """The figure of the reproduction called ``name``, as SVG or else as PNG; None if it was not drawn."""
        for form in ("svg", "png") if name else ():
            path = self.results / "reproduction" / "figures" / f"{name}.{form}"
            if path.is_file():
                return Figure(f"figures/{path.name}", path.read_bytes(), title)
        return None

    @property
    def strategies(self) -> Path:
        """The folder with the rows and traces of strategies."""
        return self.results / "reproduction" / STRATEGIES


def default_results() -> Path:
    """The folder results/ in the working directory, or else in the checkout of this code.

    Raises:
        UserError: neither folder has reproduced papers, baselines or runs.
    """
    places = [Path("results"), Path(spbench.__file__).resolve().parents[1] / "results"]
    for place in places:
        if any((place / name).is_dir() for name in ("reproduction", "baseline", "runs")):
            return place
    raise UserError(
        "there are no results here: run `spbench reproduce all`, or name a folder of results with --results"
    )


def gather(results: Path, history: Path | None) -> Gathered:
    """Read all data that pages show.

    Args:
        results: a folder with any of reproduction/, baseline/ and runs/.
        history: the folder of `spbench record`; None: RESULTS/history if it exists.

    Raises:
        UserError: a folder is missing, or a file in it cannot be read.
    """
    for option, folder, how in (
        ("--results", results, "`spbench reproduce all` makes results/"),
        ("--history", history, "`spbench record` makes one"),
    ):
        if folder is not None and not folder.is_dir():
            raise UserError(f"{option} {folder} is not a folder; {how}")
    if history is None and (results / "history").is_dir():
        history = results / "history"
    papers = [_paper(results / "reproduction", *each) for each in scenarios_of(ALL)]
    cells = list(_cells(results / "baseline", results / "runs", papers))
    if not cells and not any(paper.findings.runs for paper in papers):
        raise UserError(f"{results} has no results; `spbench reproduce all` makes them")
    rows = read_all_rows(results / "reproduction" / STRATEGIES / SIDE_BY_SIDE)
    return Gathered(results, results / "baseline", history, papers, cells, rows)


def _paper(folder: Path, paper: Paper, scenarios: Sequence[Scenario]) -> PaperResults:
    by_name = {scenario.name: scenario for scenario in scenarios}
    needed = TABLES.forms["columns"]["of papers"]
    files = {folder / f"{paper.name}{end}.csv": columns for end, columns in needed.items()}
    lines: Sequence[Line] = []
    runs: Sequence[Line] = []
    if any(file.exists() for file in files):
        lines, runs = (_checked(path, read_records(path), columns) for path, columns in files.items())
    documents = {name: scenario.document for name, scenario in by_name.items()}
    return PaperResults(paper, by_name, PaperFindings(paper.name, frame_of(lines), runs, documents))


def _checked(path: Path, records: Sequence[Line], columns: Sequence[str]) -> Sequence[Line]:
    missing = [name for name in columns if records and name not in records[0]]
    if missing:
        paper = path.stem.removesuffix("_runs")
        raise UserError(f"{path} has no column {missing[0]!r}; `spbench reproduce {paper}` writes it anew")
    return records


def _cells(baseline: Path, runs: Path, papers: Sequence[PaperResults]) -> Iterator[CellResult]:
    """The cells of every scenario, read from the first of the three places that has cells of the scenario."""
    places: dict[str, tuple[Origin, Path]] = {}
    origin: Origin
    for origin, folder in (("baseline", baseline), ("runs", runs)):  # runs replace baselines
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
    these numbers in the published units, so they are converted back into the units of measurements."""
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
