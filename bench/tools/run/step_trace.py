"""`spbench trace` at work: the simulated step of one cell, written event by event, and the text on it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Output, memory_table
from spbench.bench.command_line.progress import message, remark
from spbench.bench.command_line.record_forms import shown_band
from spbench.bench.errors import UserError
from spbench.bench.measurement import Measurement
from spbench.bench.units import shown_time
from spbench.impls import Unsupported


def traced(
    scenario: str,
    narrowing: measure.Narrowing,
    shape: Mapping[str, int | None],
    ranks: Sequence[int | None],
    engine: str,
    output: Path,
) -> Output:
    """Trace a cell, and return the output of `spbench trace`; the arguments are the command's options."""
    if measure.names_a_step(scenario):
        from spbench.bench.tools.run.own_step_trace import traced_step

        return traced_step(scenario, narrowing, ranks, engine, output)
    if engine != "virtual":
        raise UserError(f"{scenario}: --engine {engine} is for a step of your own, FILE.py:FUNCTION")
    narrowing = dataclasses.replace(narrowing, engines=("virtual",))
    cell = narrowing.only_cell("a trace", measure.load_scenario(scenario), shape)
    every = range(cell.sizes.world) if None in ranks else [rank for rank in ranks if rank is not None]
    return write_trace(cell, every, output)


def write_trace(cell: Cell, ranks: Sequence[int], output: Path) -> Output:
    """Simulate a cell, and write the timelines of ``ranks``; if empty, of the first of each class of ranks.

    Raises:
        UserError: the cell cannot be timed or run, or has no such rank.
    """
    world = cell.sizes.world
    try:
        measure.check_rates(measure.load_cluster(cell.cluster), cell.precision, world)
        if absent := [rank for rank in ranks if rank >= world]:
            raise UserError(f"--ranks {absent[0]}: the cell has ranks 0 to {world - 1}")
        if refused := measure.unproven([cell], say=remark):
            raise UserError(f"{cell.key}: {refused[cell.key].reason}")
        torch.set_num_threads(1)
        remark(f"tracing {cell.key}")
        traces = measure.trace_classes(cell, events=True)
        fits = traces.memory_measurement()
        if fits.status == "oom":
            message(f"spbench: warning: timed as if it fitted the card, which has {fits.reason}")
        timeline = traces.simulator()()
    except measure.RatesUnknown as error:
        raise UserError(f"{cell.key} cannot be timed: {error}; --cluster names another") from error
    except Unsupported as error:
        raise UserError(f"{cell.key} cannot be run: {error}") from error
    timeline.export(output, ranks or [each.first for each in traces.classes])
    measure.add_simulated_time(fits, cell, timeline)
    return _report(cell, fits, output)


def _report(cell: Cell, measurement: Measurement, output: Path) -> Output:
    measured = measure.with_band({"cell": cell.model_dump(), "measurement": measurement.as_dict()})[
        "measurement"
    ]
    parts, of_step = _spoken(measurement.parts), _spoken(measurement.breakdown)
    priced_by = measure.priced_by_in_words([measured])
    record = {
        "cell": cell.key,
        "step_time_s": measurement.step_time_s,
        **measurement.breakdown,
        **measurement.parts,
        "bound": measurement.bound,
        "mfu": measurement.mfu,
        **{name: measured[name] for name in ("step_time_low_s", "step_time_high_s", "band", "priced_by")},
        "file": str(output),
    }
    return Output(
        [
            f"step time {shown_band(measured)}, most of it {measurement.bound}; mean over ranks: {of_step}\n"
            f"of computing and exposed communication: {parts}\n"
            + (f"priced by something else, with shares of the step: {priced_by}\n" if priced_by else "")
            + f"{output}: open it in https://ui.perfetto.dev",
            memory_table({cell.key: measurement.as_dict()}),
        ],
        {**record, "by_class": measurement.by_class},
        [record],
    )


#: the words for parts of a step, where the part's name in a row with blanks would not do
_WORDS = {"memory_bound": "memory-bound", "intra_node": "intra-node links", "inter_node": "inter-node links"}


def _spoken(seconds: Mapping[str, float]) -> str:
    """The parts of a step as text, such as "bubble 2.31 ms, host 1.2 ms"; ``seconds`` is by part."""
    named = {part.removesuffix("_s"): shown_time(value) for part, value in seconds.items()}
    return ", ".join(f"{_WORDS.get(name, name.replace('_', ' '))} {time}" for name, time in named.items())
