"""`spbench trace` at work: the step of one cell, and the text on it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spbench.bench import measure
from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.command_line.output import Output
from spbench.bench.command_line.progress import message, remark
from spbench.bench.command_line.record_forms import RecordForms, flat, memory_table, shown_band
from spbench.bench.errors import UserError
from spbench.bench.measurement import Measurement
from spbench.bench.units import gib, shown_time, three_digits
from spbench.impls import Unsupported


def traced(
    scenario: str,
    narrowing: measure.Narrowing,
    shape: Mapping[str, int | None],
    ranks: Sequence[int | None],
    output: Path,
) -> Output:
    """Trace a cell, and return the output of `spbench trace`; the arguments are the command's options."""
    narrowing = dataclasses.replace(narrowing, engines=("virtual",))
    cell = narrowing.only_cell("a trace", measure.load_scenario(scenario), shape)
    every = range(cell.sizes.world) if None in ranks else [rank for rank in ranks if rank is not None]
    return (trace_step if cell.strategy == OWN_STEP else write_trace)(cell, every, output)


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


TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))


def trace_step(cell: Cell, ranks: Sequence[int], output: Path) -> Output:
    """Trace the cell of a step of the user's own, and return the output of `spbench trace`.

    Args:
        ranks: ranks that are traced and written in addition to the first of each class.
        output: the file of the timeline (.json or .json.gz), or a folder that also keeps the row.

    Raises:
        UserError: the step cannot be watched, with the user's line.
    """
    remark(f"tracing {cell.model}, whose gradients are not verified (spbench verify {cell.model})")
    traces = measure.step_traces(cell, ranks)
    result = traces.measurement()
    row, folder = measure.row_of(traces.cell, result), not {".json", ".gz"} & {*output.suffixes}
    files = [output / measure.RESULTS_FILE] if folder else []
    if folder:
        with measure.ResultsFile(output) as results:
            results.append(row)
    banded = measure.with_band(row)["measurement"]
    if result.bound:  # the time is simulated
        written = ranks or [of_class[0] for of_class in traces.ranks]
        files.append(traces.timeline.export(output / "trace.json" if folder else output, written))
    if result.unpriced_operators:
        names = ", ".join(sorted(result.unpriced_operators))
        message(
            f"spbench: warning: priced by their bytes alone, without FLOPs: {names}; if one does matmuls, "
            "torch.utils.flop_counter.register_flop_formula(torch.ops.ns.name) tells its FLOPs"
        )
    return Output(
        [
            _verdict(traces, result, banded),
            TABLES.table("alive", f"Alive at the peak of rank {result.peak_rank}", traces.held()),
            TABLES.table("communication", "Communication of a step", result.communication),
        ],
        {"row": {**row, "measurement": banded}, "classes": str(traces)},
        [flat(row)],
        files=files,
        code=int(result.status != "ok"),
        details=[memory_table({traces.cell.key: result.as_dict()})],
    )


def _verdict(traces: measure.StepTraces, result: Measurement, banded: Mapping[str, Any]) -> str:
    """The first lines: whether the step fits, its memory and its time, and which ranks were traced."""
    verdict = measure.certainty(traces.cell, result.as_dict())
    word = "fits" if verdict is None else verdict.word
    usable = result.usable_memory_bytes
    lines = [
        f"{word}: PyTorch reserves {gib(result.reserved_memory_bytes)} GiB"
        + (f" of {gib(usable)} GiB" if usable else "")
        + f", peak {gib(result.peak_memory_bytes)} GiB in {result.peak_phase} on rank {result.peak_rank}"
        + (f"; {why}" if (why := result.reason or (verdict.reason if verdict else "")) else "")
    ]
    if result.step_time_s:
        lines.append(
            f"simulated step time {shown_band(banded)}, most of it {result.bound}"
            + (f", MFU {three_digits(100 * result.mfu)}%" if result.mfu else "")
            + f"; {banded['band']}"
        )
        lines.append(f"mean over ranks: {_spoken(result.breakdown)}")
    return "\n".join([*lines, str(traces)])
