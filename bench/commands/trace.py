"""What `spbench trace` does, once its arguments are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from spbench.bench.cell import Cell
from spbench.bench.commands import output as report
from spbench.bench.config.cluster import load_cluster
from spbench.bench.config.scenario import Scenario, load_scenario
from spbench.bench.config.select import Narrowing, narrowed_cells
from spbench.bench.engines.virtual import trace_classes
from spbench.bench.errors import UserError
from spbench.bench.simulator.costs import RatesUnknown, check_rates
from spbench.bench.simulator.trace_export import export_trace
from spbench.impls.strategies.base import Unsupported

#: cells that are named where more than one is left
_NAMED = 3


def write_trace(
    name: str, narrowing: Narrowing, shape: Mapping[str, int | None], ranks: Sequence[int], output: Path
) -> int:
    """Simulate the one cell that is chosen, and write ranks' timelines; returns the exit code.

    Args:
        shape: batch and seq_len that are asked for, None where any will do.

    Raises:
        UserError: not one cell is left, it cannot be timed or run, or it has no such rank.
    """
    scenario = load_scenario(name)
    cell = the_cell(scenario, narrowing, shape)
    cluster, world = load_cluster(cell.cluster), cell.sizes.world
    try:
        check_rates(cluster, cell.precision, world)
    except RatesUnknown as error:
        raise UserError(f"{cell.key} cannot be timed: {error}; --cluster names another") from error
    if absent := [rank for rank in ranks if rank >= world]:
        raise UserError(f"--ranks {absent[0]}: the cell has ranks 0 to {world - 1}")
    torch.set_num_threads(1)
    report.message(f"tracing {cell.key}")
    try:
        traces = trace_classes(cell, events=True)
    except Unsupported as error:
        raise UserError(f"{cell.key} cannot be run: {error}") from error
    fits = traces.memory_measurement()
    if fits.status == "oom":
        report.message(f"spbench: warning: timed as if it fitted the card, which has {fits.reason}")
    timeline = traces.simulator()()
    export_trace(timeline, output, ranks or [each.first for each in traces.classes])
    parts = ", ".join(
        f"{part.removesuffix('_s').replace('_', ' ')} {seconds:.4g} s"
        for part, seconds in timeline.breakdown.items()
    )
    print(f"step time {timeline.step_time_s:.4g} s; mean over ranks: {parts}")
    print(f"{output}: open it in https://ui.perfetto.dev")
    return 0


def the_cell(scenario: Scenario, narrowing: Narrowing, shape: Mapping[str, int | None]) -> Cell:
    """The cell that is left, with the shape that is asked for where the scenario searches.

    Raises:
        UserError: none is left, more than one is, or it searches for something that is not given.
    """
    cells = narrowed_cells(scenario, narrowing)
    for field, value in shape.items():
        if value is None:
            continue
        has = list(dict.fromkeys(str(getattr(cell, field)) for cell in cells))
        cells = [cell if getattr(cell, field) else cell.at(value) for cell in cells]
        cells = [cell for cell in cells if getattr(cell, field) == value]
        if not cells:
            raise UserError(f"no cell that is left has {field} {value}; they have: {', '.join(has)}")
    if len(cells) > 1:
        named = ", ".join(cell.key for cell in cells[:_NAMED])
        more = ", ..." if len(cells) > _NAMED else ""
        raise UserError(
            f"{len(cells)} cells are left, a trace is of one: {named}{more}; "
            "choose with --strategy, --model, --world-size, --variant, --batch or --seq-len"
        )
    (cell,) = cells
    if cell.search is not None:
        quantity = cell.search.quantity
        raise UserError(f"{cell.key} searches for its {quantity}: give one, --{quantity.replace('_', '-')} N")
    return cell
