"""`spbench run`: run a scenario's cells, or say which would run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import click

from spbench.bench.command_line import options
from spbench.bench.command_line.output import Output
from spbench.bench.measure import beginning_server


@click.command("run")
@options.choosing_cells
@options.many("--engine", options.WORDS, "Run on these engines instead of the scenario's.")
@options.device
@click.option(
    "--rank",
    type=options.WholeNumber(min=0),
    help="The rank that an engine plays which plays one alone; that with the largest peak if left out.",
)
@options.jobs
@options.executor
@options.path_option("--output", "Folder for results; default results/runs/NAME.")
@options.fresh
@click.option(
    "--timeout",
    type=options.LIMIT,
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
    "--must-fit", is_flag=True, help="Exit code 1 where a cell does not fit or is unsupported, too."
)
@click.option("--unverified", is_flag=True, help="Run what is not proven right too; its rows are a mismatch.")
@click.option("--dry-run", is_flag=True, help="Say what would run, and run nothing.")
@options.printed
def command(dry_run: bool, **asked: Any) -> Output:
    """Run the cells of SCENARIO, beside what was published.

    Results are kept cell by cell: a run that was interrupted goes on where it was. A cell whose cluster,
    model, strategy, code or torch has changed since is run again.
    """
    with nullcontext() if dry_run else beginning_server():
        from spbench.bench.tools.run.run_output import run

    return run(dry_run=dry_run, **asked)
