"""Run a scenario's cells, keep their rows in a folder, and say which rates the times rest on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spbench import impls
from spbench.bench import measure
from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.command_line.progress import SweepProgress, message, remark
from spbench.bench.errors import Interrupted
from spbench.bench.measured_code import has_baseline, refuse_unmeasured_checkout, unmeasured_checkout
from spbench.bench.row import FAULTS, FINAL, Row


@dataclass(frozen=True)
class RanScenario:
    """The rows of a scenario's cells after a run.

    Attributes:
        rows: the rows of the cells that were run or kept.
        declared: the scenario's own cells.
        known: the current rows of the results file, by key, of the declared cells and of those that were run,
            even if an earlier run with another choice of cells has measured them.
        path: the path of the results file.
    """

    rows: list[Row]
    declared: list[Cell]
    known: dict[str, Row]
    path: Path

    def failed(self, must_fit: bool = False) -> bool:
        """Whether any cells failed or are wrong, or do not fit though they must (``must_fit``); if so, a
        message says how many cells, by status."""
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
    scenario: measure.Scenario,
    narrowing: measure.Narrowing,
    folder: Path,
    jobs: int | None,
    fresh: bool,
    crew: measure.Crew | None = None,
    executor: measure.Executor | None = None,
    timeout_s: float | None = None,
    unverified: bool = False,
    watch: SweepProgress | None = None,
) -> RanScenario:
    """Run a scenario's cells into a folder. On standard error a person sees what runs, how many cells have
    ended, and which times rest on substitutes.

    Args:
        fresh: move earlier results aside instead of keeping them.
        jobs, crew, executor, unverified: passed to :func:`sweep`.
        timeout_s: seconds that a cell may take; None: the scenario's.
        watch: of several scenarios together, which expects the cells of all; None: a watch of its own.

    Raises:
        UserError: no cell is chosen, the folder cannot be written, or :func:`_check_measured_tree` raises.
        Interrupted: a person ended the run; the error says how many cells are kept.
    """
    _check_measured_tree(scenario.name)
    declared = narrowing.declared(scenario)
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    cells = [cell.model_copy(update=limit) for cell in narrowing.cells(scenario, declared)]
    digest_of = measure.digests_of_a_run()
    with measure.ResultsFile(folder, fresh=fresh) as results:
        todo = measure.unfinished(cells, results, digest_of)
        _announce(results, measure.outdated(cells, results.rows, digest_of), scenario)
        kept = f", {len(cells) - len(todo)} of them kept from before" if len(cells) > len(todo) else ""
        running = f"; running {len(todo)}, {measure.at_once(todo, jobs, executor)} at a time" if todo else ""
        remark(f"{scenario.name}: {scenario.document.title}: {len(cells)} cells{kept}{running}")
        try:
            with nullcontext(watch) if watch else SweepProgress(len(todo)) as shown:
                rows = measure.sweep_cells(
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
            done = len(cells) - len(measure.unfinished(cells, results, digest_of))
            text = f"interrupted; {done} of {len(cells)} cells are in {results.path}, the same command "
            raise Interrupted(f"{text}{'without --fresh ' if fresh else ''}goes on") from interrupt
        of = {cell.key: cell for cell in [*declared, *cells]}
        rows_of = {key: row for key, row in results.rows.items() if key in of}
        known = {k: r for k, r in rows_of.items() if not measure.changed_parts(of[k], r, digest_of)}
    for text in _remarks(rows, scenario):
        message(f"{scenario.name}: {text}")
    return RanScenario(rows, declared, known, results.path)


def _announce(results: measure.ResultsFile, stale: str, scenario: measure.Scenario) -> None:
    """Show the problems of earlier results in the folder, and how many of them are out of date."""
    for problem in results.problems:
        message(f"spbench: warning: {problem}")
    if results.moved:
        message(f"earlier results are now {results.moved}")
    if stale:
        remark(f"{scenario.name}: {stale}")


def _check_measured_tree(scenario: str) -> None:
    """Warn once if the checkout of spbench around the working folder is not the code that is measured.

    Raises:
        UserError: that checkout has a baseline of the scenario, which is not for rows of other code.
    """
    here = Path.cwd()
    if has_baseline(scenario, here):
        refuse_unmeasured_checkout(here, f"this run of {scenario}, which has a baseline here,")
    if warning := unmeasured_checkout(here):
        _tell_once(f"spbench: warning: {warning}")


@cache
def _tell_once(text: str) -> None:
    message(text)


def _remarks(rows: Sequence[Row], scenario: measure.Scenario) -> Iterator[str]:
    """Remarks on rows: operators of unknown cost, with their most calls in one cell; times without a rate;
    steps with unverified gradients; attention by matmuls; the attention kernel chosen for the user."""
    unsaid = any("attention" not in c.model_options for each in scenario.cells.values() for c in each)
    calls = Counter[str]()
    for row in rows:
        calls |= Counter(row["measurement"].get("unpriced_operators") or {})
    if calls:
        named = ", ".join(f"{name} ({n})" for name, n in sorted(calls.items()))
        yield f"timed by the bytes that they move alone, as their cost is not known: {named}"
    missing = [
        row["measurement"] for row in rows if row["measurement"].get("rates") in measure.ErrorModel.NO_RATE
    ]
    if missing:
        yield f"{len(missing)} of {len(rows)} times lack a rate: {measure.priced_by_in_words(missing)}"
    for own in dict.fromkeys(row["cell"]["model"] for row in rows if row["cell"]["strategy"] == OWN_STEP):
        yield f"the gradients of {own} are not verified; spbench verify {own} compares them with one rank's"
    rows = [row for row in rows if row["cell"]["strategy"] != OWN_STEP]
    if names := _attending_by_matmuls(rows):
        yield (
            f"{', '.join(names)}: softmax attention by matmuls, priced as these, with its scores in memory; "
            "F.scaled_dot_product_attention would count as attention (docs/add_strategy.md)"
        )
    if kernels := default_attention(rows) if unsaid else []:
        yield f"attention not said, so taken: {'; '.join(kernels)}; model_options.attention says one"


def _attending_by_matmuls(rows: Sequence[Row]) -> list[str]:
    """The names of users' strategies whose models have causal softmax attention but run no kernel of it."""
    names = dict[str, None]()
    for row in rows:
        cell, parts = row["cell"], row["measurement"].get("parts") or {}
        classes = impls.nesting(cell["strategy"]).classes
        if not parts or parts.get("attention_s") or all(map(impls.is_packaged, classes)):
            continue
        model = impls.model_preset(cell["model"], cell["model_options"], cell["model_config_json"])
        if any(site.kind == "causal_attention" for site in model.sites(1, cell["seq_len"] or 1)):
            names[cell["strategy"]] = None
    return [*names]


def default_attention(rows: Sequence[Row]) -> list[str]:
    """A phrase for each cluster on the attention kernel of its simulated times, where the programs' usual
    kernel is not the default of the cluster's file."""
    kernels: dict[str, str] = {}
    for row in rows:
        cell, attention_s = row["cell"], (row["measurement"].get("parts") or {}).get("attention_s")
        name, kernel = cell["cluster"], (cell.get("model_options") or {}).get("attention", measure.NO_KERNEL)
        device = measure.load_cluster(name).device
        rates, usual = device.attention, measure.usual_kernel(device)
        unlike = kernel not in (measure.NO_KERNEL, usual)
        if not attention_s or rates is None or usual == rates.default or unlike:
            continue
        # a model whose attention is linear has no such option
        config = cell.get("model_config_json")
        if not measure.option_mistakes("model_options", cell["model"], {"attention": usual}, config):
            of_file = f"{rates.default}, the default of {name} (its programs usually run {usual})"
            kernels.setdefault(name, f"{usual}, usual on {name}" if kernel == usual else of_file)
    return list(kernels.values())
