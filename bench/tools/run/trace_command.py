"""`spbench trace`: the simulated step of one cell, event by event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spbench.bench.command_line.options import choosing_cells, many, numbers, path_option, printed, shape
from spbench.bench.command_line.output import Output

if TYPE_CHECKING:
    from spbench.bench.measure.scenarios.select import Narrowing


@click.command("trace")
@choosing_cells
@shape
@many("--ranks", numbers(least=0), "Ranks to write; the first of each pipeline stage if left out.")
@path_option("--output", "The file.", default="trace.json", show_default=True)
@printed
def command(
    scenario: str,
    narrowing: Narrowing,
    shape: Mapping[str, int | None],
    ranks: tuple[int, ...],
    output: Path,
) -> Output:
    """Write the simulated step of a cell as a trace for Perfetto.

    The cell is one of SCENARIO, chosen by the options; the trace has its step event by event. The command
    also says the memory of each class of ranks that run the same program.
    """
    from spbench.bench.measure.scenarios.select import the_cell
    from spbench.bench.tools.papers.answer import load_scenario
    from spbench.bench.tools.run.step_trace import write_trace

    narrowing = dataclasses.replace(narrowing, engines=("virtual",))
    return write_trace(the_cell("a trace", load_scenario(scenario), narrowing, shape), ranks, output)
