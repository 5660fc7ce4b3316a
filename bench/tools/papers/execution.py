"""What the commands run, baseline and reproduce have in common: run a scenario's cells into a folder,
compare them with what was published, and draw their figure. Progress goes to standard error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spbench.bench.command_line.progress import SweepProgress, message, remark
from spbench.impls.outside_code import told
from spbench.plots import FIGURES, NothingToDraw

if TYPE_CHECKING:
    from pandas import DataFrame

    from spbench.bench.cell import Cell
    from spbench.bench.measure.scenarios.scenario import Scenario
    from spbench.bench.measure.scenarios.select import Narrowing
    from spbench.bench.measure.sweep.digest import Digesting
    from spbench.bench.measure.sweep.executor import Executor
    from spbench.bench.measure.sweep.results import ResultsFile, Row
    from spbench.bench.measure.sweep.worker import Crew
    from spbench.bench.tools.papers.comparison import Comparison


@dataclass(frozen=True)
class Ran:
    """What became of a scenario's cells.

    Attributes:
        rows: of the cells that were asked for.
        known: of these, and of all declared cells that an earlier, differently narrowed run has measured and
            that are not out of date.
        files: cells.jsonl, and comparison.csv if there is anything to compare.
    """

    rows: list[Row]
    known: list[Row]
    comparisons: list[Comparison]
    files: list[Path]

    def failed(self, require: str | None = None) -> bool:
        """Whether cells have no result or a wrong one, or another status than is required; if so, a message
        says how many, by status."""
        from spbench.bench.measure.sweep.results import FAULTS, FINAL

        counts = Counter(row["status"] for row in self.rows if row["status"] in FAULTS)
        if counts:
            detail = ", ".join(f"{count} {status}" for status, count in counts.items())
            detail = "" if counts.keys() == {"failed"} else f" ({detail})"
            again = "; the same command tries them again" if counts.keys() - set(FINAL) else ""
            message(f"spbench: {counts.total()} of {len(self.rows)} cells failed{detail}{again}")
        others = Counter(row["status"] for row in self.rows if require not in (None, row["status"]))
        if others:
            detail = ", ".join(f"{count} {status}" for status, count in others.items())
            message(f"spbench: {others.total()} of {len(self.rows)} cells are not {require}: {detail}")
        return bool(counts or others)


def run_cells(
    scenario: Scenario,
    narrowing: Narrowing,
    folder: Path,
    jobs: int | None,
    fresh: bool,
    crew: Crew | None = None,
    executor: Executor | None = None,
    timeout_s: float | None = None,
) -> Ran:
    """Run a scenario's cells into a folder, show progress, and compare them with what was published.

    Args:
        jobs: cells at a time; None: as many as there are usable cores.
        fresh: move earlier results aside instead of keeping them.
        crew: the workers; None: the sweep starts its own.
        executor: where cells run that need nothing of this machine; None: here.
        timeout_s: seconds that a cell may take; None: what the scenario says.

    Raises:
        UserError: nothing is left to run, the folder cannot be written, or the scenario has a baseline in the
            checkout around the working folder, and another tree is measured.
        click.Abort: interrupted; it says how many cells are kept.
    """
    from spbench.bench.measure.scenarios.scenario import compare
    from spbench.bench.measure.scenarios.select import declared_cells, narrowed_cells
    from spbench.bench.measure.sweep.digest import digests_of_a_run, is_current
    from spbench.bench.measure.sweep.results import ResultsFile
    from spbench.bench.tools.papers.comparison import write as write_comparisons

    _check_measured_tree(scenario.name)
    declared = declared_cells(scenario, narrowing)
    cells = narrowed_cells(scenario, narrowing, declared)
    if timeout_s is not None:
        cells = [cell.model_copy(update={"timeout_s": timeout_s}) for cell in cells]
    digest_of = digests_of_a_run()
    with ResultsFile(folder, fresh=fresh) as results:
        rows = _swept(scenario, cells, results, digest_of, fresh, jobs, crew, executor)
        known = {cell.key: cell for cell in [*declared, *cells]}
        current = {
            key: row
            for key, row in results.rows.items()
            if key in known and is_current(known[key], row, digest_of)
        }
        comparisons = compare(scenario, declared, current)
        files = [results.path]
        if comparisons:
            files.append(write_comparisons(comparisons, folder))
    for said in filter(None, (_unpriced(rows), _substituted(rows), _default_attention(rows))):
        message(f"{scenario.name}: {said}")
    return Ran(rows, list(current.values()), comparisons, files)


def _check_measured_tree(scenario: str) -> None:
    """Say once on standard error where the checkout of spbench around the working folder is not what is
    measured.

    Raises:
        UserError: it has a baseline of the scenario, with which rows of other code have nothing to do.
    """
    from spbench.bench.measured_code import has_baseline, refuse_unmeasured_checkout, unmeasured_checkout

    here = Path.cwd()
    if has_baseline(scenario, here):
        refuse_unmeasured_checkout(here, f"this run of {scenario}, which has a baseline here,")
    if said := unmeasured_checkout(here):
        _say_once(f"spbench: warning: {said}")


@cache
def _say_once(text: str) -> None:
    message(text)


def _swept(
    scenario: Scenario,
    cells: list[Cell],
    results: ResultsFile,
    digest_of: Digesting,
    fresh: bool,
    jobs: int | None,
    crew: Crew | None,
    executor: Executor | None,
) -> list[Row]:
    """The rows of the cells, of which those that are unfinished are run; it says what it does meanwhile.

    Raises:
        click.Abort: interrupted; it says how many cells are kept.
    """
    from spbench.bench.measure.sweep.sweep import at_once, sweep, unfinished

    todo = unfinished(cells, results, digest_of)
    _announce(scenario, results, cells, todo, at_once(todo, jobs, executor), digest_of)
    try:
        with SweepProgress(len(todo)) as progress:
            return sweep(
                cells,
                results,
                crew=crew,
                executor=executor,
                jobs=jobs,
                digest_of=digest_of,
                on_start=progress.begin,
                on_end=progress.end,
            )
    except KeyboardInterrupt as interrupt:
        kept = len(cells) - len(unfinished(cells, results, digest_of))
        again = "the same command without --fresh" if fresh else "the same command"
        raise click.Abort(
            f"interrupted; {kept} of {len(cells)} cells are in {results.path}, {again} goes on"
        ) from interrupt


def _unpriced(rows: Sequence[Row]) -> str:
    """A line that names the operators whose cost is not known, each with its most calls in one cell; "" if
    the cost of all is known."""
    calls: dict[str, int] = {}
    for row in rows:
        for name, n in (row["measurement"].get("unpriced_operators") or {}).items():
            calls[name] = max(n, calls.get(name, 0))
    named = ", ".join(f"{name} ({n})" for name, n in sorted(calls.items()))
    return f"timed by the bytes that they move alone, as their cost is not known: {named}" if calls else ""


def _substituted(rows: Sequence[Row]) -> str:
    """A line on the times of which work has no rate at all; "" if there are none."""
    from spbench.bench.measure.trust.priced_by import priced_by_in_words

    missing = [row["measurement"] for row in rows if row["measurement"].get("rates") == "substituted"]
    if not missing:
        return ""
    return f"{len(missing)} of {len(rows)} times lack a rate: {priced_by_in_words(missing)}"


def _default_attention(rows: Sequence[Row]) -> str:
    """A line on simulated times with an attention kernel that nobody said, on clusters whose programs usually
    run another one than the file's default; "" if there are none."""
    from spbench.bench.measure.clusters.attention_kernels import usual_kernel
    from spbench.bench.measure.clusters.cluster import load_cluster
    from spbench.bench.measure.scenarios.choices import option_mistakes

    told: dict[str, str] = {}
    for row in rows:
        cell, attention_s = row["cell"], (row["measurement"].get("parts") or {}).get("attention_s")
        name, said = cell["cluster"], (cell.get("model_options") or {}).get("attention", "flash")
        if not attention_s or said != "flash" or name in told:
            continue
        device = load_cluster(name).device
        known, usual = device.attention, usual_kernel(device)
        if known is None or usual == known.default:
            continue
        # a model whose attention is linear has no such option
        if not option_mistakes(
            "model_options", cell["model"], {"attention": usual}, cell.get("model_config_json")
        ):
            told[name] = f"{known.default}, the default of {name} (its programs usually run {usual})"
    if not told:
        return ""
    return f"attention not said, so taken: {'; '.join(told.values())}; model_options.attention says one"


def opened_executor(address: str | None) -> AbstractContextManager[Executor | None]:
    """The executor of an address, connected until the context is left; None for None.

    Raises:
        UserError: there is none at that address, or it cannot run cells.
    """
    from spbench.bench.measure.sweep.executor import opened

    return nullcontext() if address is None else opened(address)


def _announce(
    scenario: Scenario,
    results: ResultsFile,
    cells: Sequence[Cell],
    todo: list[Cell],
    at_a_time: int,
    digest_of: Digesting,
) -> None:
    """Say on standard error what is about to run, and what earlier results there are."""
    from spbench.bench.measure.sweep.digest import outdated

    for problem in results.problems:
        message(f"spbench: warning: {problem}")
    if results.moved:
        message(f"earlier results are now {results.moved}")
    if stale := outdated(cells, results.rows, digest_of):
        remark(f"{scenario.name}: {stale}")
    total = len(cells)
    kept = f", {total - len(todo)} of them kept from before" if total > len(todo) else ""
    running = f"; running {len(todo)}, {at_a_time} at a time" if todo else ""
    remark(f"{scenario.name}: {scenario.document.title}: {total} cells{kept}{running}")


def draw_figure(scenario: Scenario, ran: Ran, folder: Path) -> tuple[list[Path], bool]:
    """The files of the scenario's figure, and whether drawing failed."""
    from spbench.bench.tools.papers.comparison import as_frame

    figure = scenario.document.figure
    if figure is None or not ran.known:
        return [], False
    return _drawn(figure, ran.known, as_frame(ran.comparisons), folder)


def draw_records(paper: str, records: Sequence[Mapping[str, Any]], folder: Path) -> tuple[list[Path], bool]:
    """The files of the figure of all of a paper's numbers, and whether drawing failed; none where there
    is no figure of the paper's name.

    Args:
        records: of `spbench reproduce`.
    """
    from pandas import DataFrame

    return _drawn(paper, [], DataFrame([dict(record) for record in records]), folder)


def _drawn(figure: str, rows: Sequence[Row], comparison: DataFrame, folder: Path) -> tuple[list[Path], bool]:
    """The files of a figure, none where there is no such figure, and whether drawing failed."""
    if figure not in FIGURES:
        return [], False
    try:
        return [Path(path) for path in FIGURES.load(figure)(rows, comparison, folder)], False
    except NothingToDraw as error:
        message(f"spbench: the figure {figure} was not drawn: {error}; the results are kept")
        return [], True
    except (Exception, SystemExit) as error:
        message(f"spbench: the figure {figure} could not be drawn: {told(error)}; the results are kept")
        return [], True
