"""What the commands run, baseline and reproduce have in common: run a scenario's cells into a folder,
compare them with what was published, and draw their figure. Progress goes to standard error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spbench.bench.cell import Cell
from spbench.bench.command_line.progress import SweepProgress, message, remark
from spbench.bench.measure import (
    NO_KERNEL,
    NO_RATE,
    Crew,
    Digesting,
    Executor,
    Narrowing,
    ResultsFile,
    Scenario,
    at_once,
    digests_of_a_run,
    is_current,
    load_cluster,
    opened,
    option_mistakes,
    outdated,
    priced_by_in_words,
    run_sweep,
    unfinished,
    usual_kernel,
    with_band,
)
from spbench.bench.measured_code import has_baseline, refuse_unmeasured_checkout, unmeasured_checkout
from spbench.bench.row import FAULTS, FINAL, Row
from spbench.bench.tools.papers.answer import compare
from spbench.bench.tools.papers.comparison import Comparison, as_frame
from spbench.bench.tools.papers.comparison import write as write_comparisons
from spbench.impls import is_packaged, model_preset, nesting, told
from spbench.plots import FIGURES, NothingToDraw

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class RanScenario:
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

    def failed(self, must_fit: bool = False) -> bool:
        """Whether cells have no result or a wrong one, or do not fit where they must; if so, a message says
        how many, by status."""
        counts = Counter(row["status"] for row in self.rows if row["status"] in FAULTS)
        if counts:
            detail = "" if counts.keys() == {"failed"} else f" ({_counted(counts)})"
            again = "; the same command tries them again" if counts.keys() - set(FINAL) else ""
            message(f"spbench: {counts.total()} of {len(self.rows)} cells failed{detail}{again}")
        others = Counter(row["status"] for row in self.rows if must_fit and row["status"] != "ok")
        if others:
            count = f"{others.total()} of {len(self.rows)}"
            message(f"spbench: {count} cells are not ok: {_counted(others)}")
        return bool(counts or others)


def _counted(statuses: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in statuses.items())


def run_cells(
    scenario: Scenario,
    narrowing: Narrowing,
    folder: Path,
    jobs: int | None,
    fresh: bool,
    crew: Crew | None = None,
    executor: Executor | None = None,
    timeout_s: float | None = None,
    unverified: bool = False,
    progress: SweepProgress | None = None,
) -> RanScenario:
    """Run a scenario's cells into a folder, show progress, and compare them with what was published.

    Args:
        jobs: cells at a time; None: as many as there are usable cores.
        fresh: move earlier results aside instead of keeping them.
        crew: the workers; None: the sweep starts its own.
        executor: where cells run that need nothing of this machine; None: here.
        timeout_s: seconds that a cell may take; None: what the scenario says.
        unverified: run cells that are not proven right too.
        progress: of several scenarios, all of whose cells it expects; None: these cells have their own.

    Raises:
        UserError: nothing is left to run, the folder cannot be written, or :func:`_check_measured_tree`.
        click.Abort: interrupted; it says how many cells are kept.
    """
    _check_measured_tree(scenario.name)
    declared = narrowing.declared(scenario)
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    cells = [cell.model_copy(update=limit) for cell in narrowing.cells(scenario, declared)]
    digest_of = digests_of_a_run()
    with ResultsFile(folder, fresh=fresh) as results:
        todo = unfinished(cells, results, digest_of)
        _announce(scenario, results, cells, todo, at_once(todo, jobs, executor), digest_of)
        try:
            with nullcontext(progress) if progress else SweepProgress(len(todo)) as shown:
                rows = run_sweep(
                    cells,
                    results,
                    crew=crew,
                    executor=executor,
                    jobs=jobs,
                    digest_of=digest_of,
                    unverified=unverified,
                    say=lambda text: remark(f"{scenario.name}: {text}"),
                    on_start=shown.begin,
                    on_end=shown.end,
                )
        except KeyboardInterrupt as interrupt:
            kept = len(cells) - len(unfinished(cells, results, digest_of))
            text = f"interrupted; {kept} of {len(cells)} cells are in {results.path}, the same command "
            raise click.Abort(f"{text}{'without --fresh ' if fresh else ''}goes on") from interrupt
        of = {cell.key: cell for cell in [*declared, *cells]}
        current = {k: row for k, row in results.rows.items() if k in of and is_current(of[k], row, digest_of)}
        comparisons = compare(scenario, declared, current)
        files = [results.path] + ([write_comparisons(comparisons, folder)] if comparisons else [])
    for text in _remarks(rows, scenario):
        message(f"{scenario.name}: {text}")
    return RanScenario(rows, list(current.values()), comparisons, files)


def opened_executor(address: str | None) -> AbstractContextManager[Executor | None]:
    """The executor of an address, connected until the context is left; None for None.

    Raises:
        UserError: there is none at that address, or it cannot run cells.
    """
    return nullcontext() if address is None else opened(address)


# -- what is said of a run -----------------------------------------------------------------------------------


def _check_measured_tree(scenario: str) -> None:
    """Say once on standard error where the checkout of spbench around the working folder is not what is
    measured.

    Raises:
        UserError: it has a baseline of the scenario, with which rows of other code have nothing to do.
    """
    here = Path.cwd()
    if has_baseline(scenario, here):
        refuse_unmeasured_checkout(here, f"this run of {scenario}, which has a baseline here,")
    if warning := unmeasured_checkout(here):
        _say_once(f"spbench: warning: {warning}")


_say_once = cache(message)


def _announce(
    scenario: Scenario,
    results: ResultsFile,
    cells: Sequence[Cell],
    todo: list[Cell],
    at_a_time: int,
    digest_of: Digesting,
) -> None:
    """Say on standard error what is about to run, and what earlier results there are."""
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


def _remarks(rows: Sequence[Row], scenario: Scenario) -> Iterator[str]:
    """What is to be known of the times of some rows: operators whose cost is not known, each with its most
    calls in one cell; times without a rate; and the attention kernel, where the scenario does not say it."""
    unsaid = any("attention" not in c.model_options for each in scenario.cells.values() for c in each)
    calls: dict[str, int] = {}
    for row in rows:
        for name, n in (row["measurement"].get("unpriced_operators") or {}).items():
            calls[name] = max(n, calls.get(name, 0))
    if calls:
        named = ", ".join(f"{name} ({n})" for name, n in sorted(calls.items()))
        yield f"timed by the bytes that they move alone, as their cost is not known: {named}"
    missing = [row["measurement"] for row in rows if row["measurement"].get("rates") in NO_RATE]
    if missing:
        yield f"{len(missing)} of {len(rows)} times lack a rate: {priced_by_in_words(missing)}"
    if names := _attending_by_matmuls(rows):
        yield (
            f"{', '.join(names)}: softmax attention by matmuls, priced as these, with its scores in memory; "
            "F.scaled_dot_product_attention would count as attention (docs/add_strategy.md)"
        )
    if kernels := default_attention(rows) if unsaid else []:
        yield f"attention not said, so taken: {'; '.join(kernels)}; model_options.attention says one"


def _attending_by_matmuls(rows: Sequence[Row]) -> list[str]:
    """The strategies of users whose models have causal softmax attention, where steps run no kernel of it."""
    names = dict[str, None]()
    for row in rows:
        cell, parts = row["cell"], row["measurement"].get("parts") or {}
        if not parts or parts.get("attention_s") or all(map(is_packaged, nesting(cell["strategy"]).classes)):
            continue
        model = model_preset(cell["model"], cell["model_options"], cell["model_config_json"])
        if any(site.kind == "causal_attention" for site in model.sites(1, cell["seq_len"] or 1)):
            names[cell["strategy"]] = None
    return [*names]


def default_attention(rows: Sequence[Row]) -> list[str]:
    """The attention kernel of each cluster that simulated times take, where that is the usual one of its
    programs and not the default of its file, or that default although programs usually run another one."""
    kernels: dict[str, str] = {}
    for row in rows:
        cell, attention_s = row["cell"], (row["measurement"].get("parts") or {}).get("attention_s")
        name, kernel = cell["cluster"], (cell.get("model_options") or {}).get("attention", NO_KERNEL)
        rates, usual = load_cluster(name).device.attention, usual_kernel(load_cluster(name).device)
        if not attention_s or rates is None or usual == rates.default or kernel not in (NO_KERNEL, usual):
            continue
        # a model whose attention is linear has no such option
        config = cell.get("model_config_json")
        if not option_mistakes("model_options", cell["model"], {"attention": usual}, config):
            of_file = f"{rates.default}, the default of {name} (its programs usually run {usual})"
            kernels.setdefault(name, f"{usual}, usual on {name}" if kernel == usual else of_file)
    return list(kernels.values())


# -- figures -------------------------------------------------------------------------------------------------


def draw_figure(scenario: Scenario, ran: RanScenario, folder: Path) -> tuple[list[Path], bool]:
    """The files of the scenario's figure, and whether drawing failed."""
    figure = scenario.document.figure
    if figure is None or not ran.known:
        return [], False
    return draw(figure, [with_band(row) for row in ran.known], as_frame(ran.comparisons), folder)


def draw(
    figure: str, rows: Sequence[Mapping[str, Any]], comparison: DataFrame, folder: Path
) -> tuple[list[Path], bool]:
    """The files of a figure, none where there is no such figure, and whether drawing failed."""
    if figure not in FIGURES:
        return [], False
    try:
        return [Path(path) for path in FIGURES.load(figure)(rows, comparison, folder)], False
    except NothingToDraw as error:
        message(f"spbench: the figure {figure} was not drawn: {error}; the results are kept")
    except (Exception, SystemExit) as error:
        message(f"spbench: the figure {figure} could not be drawn: {told(error)}; the results are kept")
    return [], True
