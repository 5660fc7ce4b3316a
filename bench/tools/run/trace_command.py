"""`spbench trace`: the simulated step of one cell, event by event."""

import click

from spbench.bench.command_line import options


@click.command("trace")
@options.choosing_cells
@options.shape
@options.many(
    "--ranks", options.numbers(least=0), "Ranks to write; by default the first of each pipeline stage."
)
@options.path_option("--output", "The file.", default="trace.json", show_default=True)
@options.printed
@options.body("run.step_trace:traced")
def command() -> None:
    """Write the simulated step of a cell as a trace for Perfetto.

    The options choose one cell of SCENARIO, and the trace has the events of its step. The command also prints
    the memory of each class of ranks that run the same program.
    """
