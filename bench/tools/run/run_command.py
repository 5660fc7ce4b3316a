"""`spbench run`: run a scenario's cells, or say which would run."""

import click

from spbench.bench.command_line import options


@click.command("run")
@options.choosing_cells
@options.many("--engine", options.WORDS, "Run on these engines instead of the scenario's.")
@options.device
@click.option(
    "--rank",
    type=options.WholeNumber(min=0),
    help="The rank that the engine `emulated` plays; by default the rank with the largest peak.",
)
@options.jobs
@options.executor
@options.path_option("--output", "Folder for results; default results/runs/NAME.")
@options.fresh
@click.option(
    "--timeout",
    type=options.LIMIT,
    metavar="SECONDS",
    help="Stop a cell after this time, whatever the scenario says.",
)
@click.option(
    "--plain-trace",
    is_flag=True,
    help="Take no short cut: run every operator of every layer, read no trace from disk and simulate every "
    "rank. Slow; checks that short cuts give the same numbers. Implies --fresh.",
)
@click.option(
    "--memory",
    is_flag=True,
    help="Show for each class of ranks and each traced step the memory, what holds it, and whether it fits.",
)
@click.option("--must-fit", is_flag=True, help="Exit with 1 also if a cell does not fit or is unsupported.")
@click.option("--unverified", is_flag=True, help="Run also what is not verified; its rows are a mismatch.")
@click.option("--dry-run", is_flag=True, help="Say what would run, and run nothing.")
@options.printed
@options.body("run.run_output:run", starts_processes=True)
def command() -> None:
    """Run the cells of SCENARIO, and compare with published numbers.

    Results are kept cell by cell, so an interrupted run continues where it was. A cell runs again if its
    cluster, model, strategy, code or torch has changed since.

    SCENARIO may also be a training step of your own, FILE.py:FUNCTION, with --world-size and --cluster.
    """
