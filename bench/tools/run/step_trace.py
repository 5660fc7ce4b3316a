"""`spbench trace` at work: the step of one cell, or of the user's own program, and the text on it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.command_line.options import refuse_given
from spbench.bench.command_line.output import Output
from spbench.bench.command_line.progress import message, remark
from spbench.bench.command_line.record_forms import RecordForms, memory_table, shown_band
from spbench.bench.errors import UserError
from spbench.bench.measurement import Measurement
from spbench.bench.units import gib, shown_time, three_digits
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


#: the options of the command that choose among the cells of a scenario
_OF_CELLS = ("strategy", "model", "where", "changes", "variant", "batch", "seq_len")
TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))


def traced_step(
    step: str,
    narrowing: measure.Narrowing,
    ranks: Sequence[int | None],
    engine: str,
    output: Path,
) -> Output:
    """Trace a step of the user's own, and return the output of `spbench trace`.

    Args:
        step: "FILE.py:FUNCTION".
        narrowing: has one cluster and one world size.
        ranks: ranks that are traced and written in addition to the first of each class; None: all.
        output: the file of the timeline (.json or .json.gz), or a folder that also keeps the row.

    Raises:
        UserError: the step cannot be watched, with the user's line; or an option is missing.
    """
    refuse_given(_OF_CELLS, "chooses among the cells of a scenario, and has no effect on a step of your own")
    clusters, world_sizes = narrowing.clusters, narrowing.world_sizes
    if len(clusters) != 1 or len(world_sizes) != 1:
        raise UserError(f"{step}: give one --world-size and one --cluster, such as --cluster dgx-h100")
    world = world_sizes[0]
    every = None if None in ranks else [rank for rank in ranks if rank is not None]
    remark(f"tracing {step}")
    measured: measure.MeasuredStep
    if engine == "distributed":
        measured = measure.real_step(step, world, clusters[0], measure.chosen_device("available"))
    else:
        measured = measure.measured_step(step, world, clusters[0], every)
    result = measured.measurement
    folder = not {".json", ".gz"} & {*output.suffixes}
    timeline = output / "trace.json" if folder else output
    written = [*(range(world) if every is None else every)] or [ranks[0] for ranks in measured.classes.ranks]
    files = [measured.keep(output)] if folder else []
    banded = measure.with_band(measured.row)["measurement"]
    if result.bound:  # the time is simulated
        files.append(measured.timeline.export(timeline, written))
    if result.unpriced_operators:
        names = ", ".join(sorted(result.unpriced_operators))
        message(
            f"spbench: warning: priced by their bytes alone, without FLOPs: {names}; if one does matmuls, "
            "torch.utils.flop_counter.register_flop_formula(torch.ops.ns.name) tells its FLOPs"
        )
    return Output(
        [
            _verdict(measured, banded),
            TABLES.table("alive", f"Alive at the peak of rank {result.peak_rank}", measured.held()),
            TABLES.table("communication", "Communication of a step", result.communication),
        ],
        {"row": {**measured.row, "measurement": banded}, "classes": str(measured.classes)},
        [measure.flat(measured.row)],
        files=files,
        code=int(result.status != "ok"),
        details=[memory_table({measured.cell.key: result.as_dict()})],
    )


def _verdict(measured: measure.MeasuredStep, banded: Mapping[str, Any]) -> str:
    """The first lines: whether the step fits, its memory and its time, and which ranks were traced."""
    result, verdict = measured.measurement, measured.verdict
    word = "fits" if verdict is None else verdict.word
    usable = result.usable_memory_bytes
    lines = [
        f"{word}: PyTorch reserves {gib(result.reserved_memory_bytes)} GiB"
        + (f" of {gib(usable)} GiB" if usable else "")
        + f", peak {gib(result.peak_memory_bytes)} GiB in {result.peak_phase} on rank {result.peak_rank}"
        + (f"; {why}" if (why := result.reason or (verdict.reason if verdict else "")) else "")
    ]
    if (samples := result.step_time_samples_s) and result.step_time_s:
        time, ranks = shown_time(result.step_time_s), measured.cell.sizes.world
        lines.append(f"step time {time} measured on {ranks} real ranks, the median of {len(samples)} steps")
    elif result.step_time_s:
        lines.append(
            f"simulated step time {shown_band(banded)}, most of it {result.bound}"
            + (f", MFU {three_digits(100 * result.mfu)}%" if result.mfu else "")
            + f"; {banded['band']}"
        )
        lines.append(f"mean over ranks: {_spoken(result.breakdown)}")
    return "\n".join([*lines, *([] if samples else [str(measured.classes)])])
