"""`spbench flags`: a cell as the arguments of a training program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spbench.bench.command_line.options import choosing_cells, path_option, printed, shape
from spbench.bench.command_line.output import Output, Verbatim

if TYPE_CHECKING:
    from spbench.bench.measure.scenarios.select import Narrowing


@click.command("flags")
@click.argument("kind", metavar="KIND")
@choosing_cells
@shape
@path_option("--output", "The file; default standard output.")
@printed
def command(
    kind: str, scenario: str, narrowing: Narrowing, shape: Mapping[str, int | None], output: Path | None
) -> Output:
    """Write a cell as the flags of a training program.

    The KIND is the program's: megatron or torchtitan. The cell is one of SCENARIO, chosen by the options.

    It is the command or the configuration that `spbench import KIND` reads as that cell again. What the
    program has no argument for is refused by name; how it makes the same in its own way is said.
    """
    from spbench.bench.errors import UserError
    from spbench.bench.files import write_whole
    from spbench.bench.measure.scenarios.choices import refusal
    from spbench.bench.measure.scenarios.scenario import load_scenario
    from spbench.bench.measure.scenarios.select import the_cell
    from spbench.bench.tools.jobs.flags import program_flags

    cell = the_cell("a command", load_scenario(scenario), narrowing, shape)
    if reason := refusal(cell):
        raise UserError(f"{cell.key} cannot be run: {reason}")
    proposed = program_flags(kind, cell)
    text = proposed.text()
    content = {"text": text, **dataclasses.asdict(proposed)}
    if output is not None:
        write_whole(output, text)
    records = [dataclasses.asdict(line) for line in proposed.lines]
    if output is None:
        return Output([Verbatim(text.removesuffix("\n"))], content, records)
    return Output((), content, records, notes=proposed.notes, files=[output])
