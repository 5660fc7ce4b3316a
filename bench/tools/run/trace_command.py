"""`spbench trace`: the simulated step of one cell, event by event."""

from __future__ import annotations

import click

from spbench.bench.command_line.options import (
    body,
    choosing_cells,
    many,
    numbers,
    path_option,
    printed,
    shape,
)


@click.command("trace")
@choosing_cells
@shape
@many("--ranks", numbers(least=0), "Ranks to write; the first of each pipeline stage if left out.")
@path_option("--output", "The file.", default="trace.json", show_default=True)
@printed
@body("run.step_trace:traced")
def command() -> None:
    """Write the simulated step of a cell as a trace for Perfetto.

    The cell is one of SCENARIO, chosen by the options; the trace has its step event by event. The command
    also says the memory of each class of ranks that run the same program.
    """
