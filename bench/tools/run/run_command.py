"""`spbench run`: run a scenario's cells, or say which would run."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from spbench.bench.command_line.output import Output
from spbench.bench.command_line.progress import message

if TYPE_CHECKING:
    from spbench.bench.measure.scenarios.select import Narrowing


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
    from spbench.bench.measure.processes.starting import begin_server

    if not dry_run:
        begin_server()  # its imports take as long as those of this process
    from spbench.bench.measure.engines.tracing import only_plain_traces
    from spbench.bench.tools.papers.answer import load_scenario
    from spbench.bench.tools.papers.execution import draw_figure, opened_executor, run_cells
    from spbench.bench.tools.papers.sources import unknown_paper
    from spbench.bench.tools.run.run_output import planned, results

    loaded = load_scenario(scenario)
    if remark := unknown_paper(loaded.document.paper):
        message(f"spbench: warning: {loaded.path}: {remark}")
    narrowing = dataclasses.replace(narrowing, engines=engine, device=device or "available", rank=rank)
    folder = output or Path("results", "runs", loaded.name)
    if dry_run:
        return planned(loaded, narrowing, folder, fresh or plain_trace)
    fresh = fresh or plain_trace
    with only_plain_traces() if plain_trace else nullcontext(), opened_executor(executor) as there:
        ran = run_cells(loaded, narrowing, folder, jobs, fresh, executor=there, timeout_s=timeout)
    drawn, figure_failed = draw_figure(loaded, ran, folder)
    return results(loaded, ran, drawn, code=1 if ran.failed(require) or figure_failed else 0, memory=memory)
