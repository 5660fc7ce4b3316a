"""`spbench trace`: the simulated step of one cell, event by event."""

import click

from spbench.bench.command_line import options


@click.command("trace")
@options.choosing_cells
@options.shape
@options.many(
    "--ranks",
    options.several("n[,n...]|all", lambda word: None if word == "all" else options.whole(word, 0)),
    "Ranks to write, or all; by default the first of each class of ranks. A step of your own is traced on "
    "these ranks.",
)
@options.path_option("--output", "The file.", default="trace.json", show_default=True)
@options.printed
@options.body("run.step_trace:traced")
def command() -> None:
    """Write the simulated step of a cell as a trace for Perfetto.

    The options choose one cell of SCENARIO, and the trace has the events of its step. The command also prints
    the memory of each class of ranks that run the same program.

    SCENARIO may also be a training step of your own, FILE.py:FUNCTION, with --world-size and --cluster. The
    command says whether the step fits the cards (if not, it exits with 1), and keeps the result if --output
    is a folder.
    """
