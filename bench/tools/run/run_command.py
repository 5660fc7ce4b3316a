"""`spbench run`: run a scenario's cells, or say which would run."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from spbench.bench.command_line.options import (
    WORDS,
    Limit,
    choosing_cells,
    device,
    executor,
    fresh,
    jobs,
    many,
    path_option,
    printed,
)
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import message
from spbench.bench.tools.papers.execution import Ran, draw_figure, opened_executor, run_cells

if TYPE_CHECKING:
    from spbench.bench.cell import Cell
    from spbench.bench.measure.scenarios.scenario import Scenario
    from spbench.bench.measure.scenarios.select import Narrowing


#: what tells planned cells apart, in the order in which a terminal gives it room
_PLANNED = ("model", "strategy", "GPUs", "now", "batch", "seq_len", "mesh", "variant", "engine", "asked")


@click.command("run")
@choosing_cells
@many("--engine", WORDS, "Run on these engines instead of the scenario's.")
@device
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="The rank that an engine plays which plays one alone; that with the largest peak if left out.",
)
@jobs
@executor
@path_option("--output", "Folder for results; default results/runs/NAME.")
@fresh
@click.option(
    "--timeout",
    type=Limit(),
    metavar="SECONDS",
    help="Give a cell up after this time, whatever the scenario says.",
)
@click.option(
    "--plain-trace",
    is_flag=True,
    help="Ask torch about every operator of every layer, read no trace from disk and simulate every rank: "
    "slow, to check that the quick way gives the same numbers. Implies --fresh.",
)
@click.option(
    "--memory",
    is_flag=True,
    help="Show the memory of each class of ranks at each traced step: which fits, and what holds it.",
)
@click.option(
    "--require",
    type=click.Choice(["ok"]),
    help="Exit code 1 where a cell is not ok: where it does not fit, or is unsupported, too.",
)
@click.option("--dry-run", is_flag=True, help="Say what would run, and run nothing.")
@printed
def command(
    scenario: str,
    narrowing: Narrowing,
    engine: tuple[str, ...],
    device: Literal["cpu", "cuda"] | None,
    rank: int | None,
    jobs: int | None,
    executor: str | None,
    output: Path | None,
    fresh: bool,
    timeout: float | None,
    plain_trace: bool,
    memory: bool,
    require: str | None,
    dry_run: bool,
) -> Output:
    """Run the cells of SCENARIO, beside what was published.

    Results are kept cell by cell: a run that was interrupted goes on where it was. A cell whose cluster,
    model, strategy, code or torch has changed since is run again.
    """
    from spbench.bench.measure.processes.answering import answers_of_server
    from spbench.bench.measure.scenarios.scenario import load_scenario
    from spbench.bench.tools.papers.sources import unknown_paper

    click.get_current_context().with_resource(answers_of_server())
    loaded = load_scenario(scenario)
    if remark := unknown_paper(loaded.document.paper):
        message(f"spbench: warning: {loaded.path}: {remark}")
    narrowing = dataclasses.replace(narrowing, engines=engine, device=device or "available", rank=rank)
    folder = output or Path("results", "runs", loaded.name)
    if dry_run:
        return planned(loaded, narrowing, folder, fresh or plain_trace)
    fresh = fresh or plain_trace
    with _plain_traces() if plain_trace else nullcontext(), opened_executor(executor) as there:
        ran = run_cells(loaded, narrowing, folder, jobs, fresh, executor=there, timeout_s=timeout)
    drawn, figure_failed = draw_figure(loaded, ran, folder)
    return results(loaded, ran, drawn, code=1 if ran.failed(require) or figure_failed else 0, memory=memory)


def _plain_traces() -> AbstractContextManager[None]:
    from spbench.bench.measure.engines.tracing import only_plain_traces  # imports torch

    return only_plain_traces()


def planned(scenario: Scenario, narrowing: Narrowing, folder: Path, fresh: bool) -> Output:
    """The cells that would run, those that cannot, and those that are kept from before."""
    from spbench.bench.measure.scenarios.choices import refusal
    from spbench.bench.measure.scenarios.select import narrowed_cells
    from spbench.bench.measure.sweep.digest import digests_of_a_run, is_final, outdated
    from spbench.bench.measure.sweep.results import RESULTS_FILE, read_rows

    cells = narrowed_cells(scenario, narrowing)
    rows, problems = ([], []) if fresh else read_rows(folder / RESULTS_FILE)
    for problem in problems:
        message(f"spbench: warning: {problem}")
    kept = {row["key"]: row for row in rows}
    digest_of = digests_of_a_run()
    if stale := outdated(cells, kept, digest_of):
        message(f"{scenario.name}: {stale}")

    def now(cell: Cell) -> str:
        if is_final(cell, kept.get(cell.key), digest_of):
            return f"kept ({kept[cell.key]['status']})"
        reason = refusal(cell)
        return f"unsupported: {reason}" if reason else "would run"

    lines = [
        {
            "cell": cell.key,
            "model": cell.model,
            "strategy": cell.strategy,
            "GPUs": cell.sizes.world,
            "mesh": cell.mesh_text,
            "batch": cell.batch,
            "seq_len": cell.seq_len,
            "variant": cell.variant,
            "engine": cell.engine,
            "asked": _asked(cell),
            "now": now(cell),
        }
        for cell in cells
    ]
    title = f"{scenario.name}: {scenario.document.title} ({len(cells)} cells)"
    table = Table(title, lines, _PLANNED, ("now",))
    return Output([table], lines, lines)


def _asked(cell: Cell) -> str:
    if cell.learning is not None:
        return f"losses of {cell.learning.steps} steps"
    return f"largest {cell.search.quantity}" if cell.search else "measurement"


def results(scenario: Scenario, ran: Ran, figures: list[Path], code: int, *, memory: bool = False) -> Output:
    """What a scenario's cells have measured, and the published numbers beside it; with ``memory`` a table of
    that of each class of ranks too."""
    from spbench.bench.command_line.memory_table import memory_table
    from spbench.bench.measure.sweep.results import finite, flat_rows
    from spbench.bench.measure.trust.bands import TIE_LEGEND, tied, with_band
    from spbench.bench.measure.trust.priced_by import priced_by_in_words
    from spbench.bench.tools.run.result_table import comparison_table, result_table
    from spbench.bench.tools.run.run_verdict import verdict

    ties = tied(ran.rows)
    sections: list[Table | str] = [result_table(scenario.document.title, ran.rows)]
    if any(ties):
        sections.append(TIE_LEGEND)
    if priced_by := priced_by_in_words(row["measurement"] for row in ran.rows):
        sections.append(f"priced by something else, with shares of the step: {priced_by}")
    if memory:
        sections.append(memory_table({row["key"]: row["measurement"] for row in ran.rows}))
    if ran.comparisons:
        sections.append(comparison_table(ran.comparisons))
    files = [*ran.files, *figures]
    content: dict[str, Any] = {
        "scenario": scenario.name,
        "rows": [{**with_band(row), "tie": tie} for row, tie in zip(ran.rows, ties, strict=True)],
        "comparison": [dataclasses.asdict(entry) for entry in ran.comparisons],
        "files": [str(path) for path in files],
    }
    notes = verdict(ran.rows, ran.comparisons)
    return Output(sections, finite(content), flat_rows(ran.rows), notes=notes, files=files, code=code)
