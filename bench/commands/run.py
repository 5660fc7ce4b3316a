"""What `spbench run` and `spbench verify` do, once their arguments are read."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spbench.bench.cell import Cell
from spbench.bench.commands import output as report
from spbench.bench.comparison import claims as compare
from spbench.bench.config.scenario import Scenario, load_scenario
from spbench.bench.config.select import Narrowing, declared_cells, narrowed_cells
from spbench.bench.errors import UserError, suggestion
from spbench.bench.sweep.provenance import provenance
from spbench.bench.sweep.results import (
    FILE,
    FINAL,
    ResultsFile,
    Row,
    as_frame,
    breaks_formula,
    finite,
    read_rows,
)
from spbench.bench.sweep.sweep import at_once, sweep, unfinished
from spbench.bench.sweep.workers import Crew
from spbench.impls.backends.registry import backends
from spbench.impls.models.model import models as all_models
from spbench.impls.strategies.registry import strategies as all_strategies
from spbench.impls.training.step import PRECISIONS

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Request:
    """What `spbench run` was asked for.

    Attributes:
        scenario: a name or a path.
        output: None: results/runs/ and the scenario's name.
        form: table, csv or json.
    """

    scenario: str
    narrowing: Narrowing
    jobs: int | None
    output: Path | None
    fresh: bool
    form: str

    def folder(self, scenario: Scenario) -> Path:
        """Where the results go."""
        return self.output or Path("results", "runs", scenario.name)


def dry_run_scenario(request: Request) -> int:
    """Print the cells that would run; returns the exit code."""
    scenario = load_scenario(request.scenario)
    cells = narrowed_cells(scenario, request.narrowing)
    rows, problems = ([], []) if request.fresh else read_rows(request.folder(scenario) / FILE)
    for problem in problems:
        report.message(f"spbench: warning: {problem}")
    status = {row["key"]: row["status"] for row in rows}
    lines = [
        {
            "cell": cell.key,
            "model": cell.model,
            "strategy": cell.strategy,
            "GPUs": cell.sizes.world,
            "asked": _asked(cell),
            "now": f"kept ({status[cell.key]})" if status.get(cell.key) in FINAL else "would run",
        }
        for cell in cells
    ]
    if request.form == "json":
        print(json.dumps(lines, indent=1))
    elif request.form == "csv":
        _print_csv(lines)
    else:
        report.show_table(f"{scenario.name}: {scenario.document.title} ({len(cells)} cells)", lines)
    return 0


def _asked(cell: Cell) -> str:
    if cell.learning is not None:
        return f"losses of {cell.learning.steps} steps"
    return f"largest {cell.search.quantity}" if cell.search else "measurement"


@dataclass(frozen=True)
class Ran:
    """What became of a scenario's cells.

    Attributes:
        rows: of the cells that were asked for.
        known: of these, and of all declared cells that an earlier, differently narrowed run has measured.
        files: cells.jsonl, and comparison.csv if there is anything to compare.
    """

    rows: list[Row]
    known: list[Row]
    comparisons: list[compare.Comparison]
    files: list[Path]

    def failed(self) -> bool:
        """Whether cells failed; says so."""
        counts = Counter(row["status"] for row in self.rows)
        failed = sum(count for status, count in counts.items() if status not in FINAL)
        if failed:
            report.message(
                f"spbench: {failed} of {len(self.rows)} cells failed; the same command tries them again"
            )
        return bool(failed)


def run_cells(
    scenario: Scenario,
    narrowing: Narrowing,
    folder: Path,
    jobs: int | None,
    fresh: bool,
    crew: Crew | None = None,
) -> Ran | None:
    """Run a scenario's cells into a folder, compare them, and tell progress; None if interrupted.

    Workers are the ``crew``'s, or the sweep's own.

    Raises:
        UserError: nothing is left to run, or the folder cannot be written.
    """
    declared = declared_cells(scenario, narrowing)
    cells = narrowed_cells(scenario, narrowing)
    with ResultsFile(folder, fresh=fresh) as results:
        todo = unfinished(cells, results)
        _announce(scenario, results, len(cells), todo, jobs)
        try:
            with report.SweepProgress(len(todo)) as progress:
                rows = sweep(
                    cells, results, crew=crew, jobs=jobs, on_start=progress.begin, on_end=progress.end
                )
        except KeyboardInterrupt:
            kept = len(cells) - len(unfinished(cells, results))
            again = "the same command without --fresh" if fresh else "the same command"
            report.message(
                f"spbench: interrupted; {kept} of {len(cells)} cells are in {results.path}, {again} goes on"
            )
            return None
        comparisons = compare.compare(scenario, declared, results.rows)
        files = [results.path]
        if comparisons:
            files.append(compare.write(comparisons, folder))
    for row in filter(breaks_formula, rows):
        report.message(f"spbench: warning: {row['key']}: bytes sent are not those of the strategy's formula")
    known = {cell.key: cell for cell in [*declared, *cells]}
    return Ran(rows, [results.rows[key] for key in known if key in results.rows], comparisons, files)


def run_scenario(request: Request) -> int:
    """Run a scenario, write and print what comes of it; returns the exit code."""
    scenario = load_scenario(request.scenario)
    folder = request.folder(scenario)
    ran = run_cells(scenario, request.narrowing, folder, request.jobs, request.fresh)
    if ran is None:
        return 130
    drawn, figure_failed = draw_figure(scenario, ran, folder)
    _show(request.form, scenario, ran.rows, ran.comparisons, [*ran.files, *drawn])
    return 1 if ran.failed() or figure_failed else 0


def _announce(
    scenario: Scenario, results: ResultsFile, total: int, todo: list[Cell], jobs: int | None
) -> None:
    for problem in results.problems:
        report.message(f"spbench: warning: {problem}")
    if results.moved:
        report.message(f"earlier results are now {results.moved}")
    kept = f", {total - len(todo)} of them kept from before" if total > len(todo) else ""
    running = f"; running {len(todo)}, {at_once(todo, jobs)} at a time" if todo else ""
    report.message(f"{scenario.name}: {scenario.document.title}: {total} cells{kept}{running}")
    others = {
        row["provenance"].get("commit")
        for row in results.rows.values()
        if isinstance(row.get("provenance"), dict)
        and row["provenance"].get("commit") != provenance()["commit"]
    }
    if others and total > len(todo):
        report.message("note: some results were made by other code than this; --fresh runs all cells again")


def draw_figure(scenario: Scenario, ran: Ran, folder: Path) -> tuple[list[Path], bool]:
    """The files of the scenario's figure, and whether drawing failed."""
    figure = scenario.document.figure
    if figure is None or not ran.known:
        return [], False
    try:
        draw = importlib.import_module(f"spbench.plots.{figure}").draw
    except (ImportError, AttributeError) as error:
        report.message(f"spbench: warning: no figure drawn, there is no plots.{figure}.draw ({error})")
        return [], False
    try:
        return [Path(path) for path in draw(ran.known, compare.as_frame(ran.comparisons), folder)], False
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        report.message(f"spbench: the figure {figure} could not be drawn: {text}; the results are kept")
        return [], True


def _show(
    form: str,
    scenario: Scenario,
    rows: list[Row],
    comparisons: list[compare.Comparison],
    files: Sequence[Path],
) -> None:
    if form == "json":
        content = {
            "scenario": scenario.name,
            "rows": rows,
            "comparison": [dataclasses.asdict(entry) for entry in comparisons],
            "files": [str(path) for path in files],
        }
        print(json.dumps(content, indent=1))
    elif form == "csv":
        as_frame(rows).to_csv(sys.stdout, index=False)
    else:
        shared, lines = report.result_rows(rows)
        report.show_table(f"{scenario.document.title} ({shared})", lines)
        if comparisons:
            print()
            report.show_table(
                "Published and ours (relative error: ours / published - 1)",
                report.comparison_rows(comparisons),
            )
        print()
    for path in files:
        print(path, file=sys.stdout if form == "table" else sys.stderr)


def verify_strategies(
    strategies: Sequence[str],
    models: Sequence[str],
    world_sizes: Sequence[int],
    dtypes: Sequence[str],
    parts: Sequence[str],
    backend: str,
    form: str,
) -> int:
    """Verify, print a line a case; returns the exit code: 1 if one is not green.

    Raises:
        UserError: an unknown name.
    """
    for kind, names, known in (
        ("strategy", strategies, sorted(all_strategies())),
        ("model", models, sorted(all_models())),
        ("dtype", dtypes, list(PRECISIONS)),
        ("part", parts, sorted({part for model in all_models().values() for part in model.parts()})),
        ("backend", [backend], sorted(backends())),
    ):
        for name in names:
            if name not in known:
                raise UserError(f"unknown {kind} {name!r}{suggestion(name, known)}")
    from spbench.bench.verification.cases import verify

    lines = []
    for row in verify(
        list(strategies) or None,
        list(models) or None,
        list(world_sizes),
        list(dtypes),
        list(parts) or None,
        backend=backend,
    ):
        lines.append(finite(dataclasses.asdict(row)))
        case = [row.strategy, row.model, row.variant, row.part, f"N={row.size}", row.dtype]
        report.message(f"{' '.join(word for word in case if word)}: {row.status}")
    counts = Counter(line["status"] for line in lines)
    if form == "json":
        print(json.dumps(lines, indent=1))
    elif form == "csv":
        _print_csv(lines)
    else:
        report.show_table(
            "Relative errors against the single-device model in fp64: the worst tensor of all ranks",
            [_rounded(line) for line in lines],
        )
        print(", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing to verify")
    return 0 if counts["green"] and counts["green"] + counts["unsupported"] == len(lines) else 1


def _rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.1e}" if isinstance(value, float) else value for key, value in line.items()}


def _print_csv(lines: Sequence[dict[str, Any]]) -> None:
    from pandas import DataFrame

    frame: DataFrame = DataFrame(lines)
    frame.to_csv(sys.stdout, index=False)
