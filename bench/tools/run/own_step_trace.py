"""`spbench trace` of a step of the user's own: whether it fits, what it holds and sends, and its time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spbench.bench import measure
from spbench.bench.command_line.options import refuse_given
from spbench.bench.command_line.output import Output, Table, memory_table
from spbench.bench.command_line.progress import message, remark
from spbench.bench.command_line.record_forms import RecordForms, shown_band
from spbench.bench.errors import UserError
from spbench.bench.units import gib, shown_share, three_digits

#: the options of the command that choose among the cells of a scenario
_OF_CELLS = ("strategy", "model", "where", "changes", "variant", "batch", "seq_len")
_TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))


def traced_step(
    step: str,
    clusters: Sequence[str],
    world_sizes: Sequence[int],
    ranks: Sequence[int | None],
    output: Path,
) -> Output:
    """Trace a step of the user's own, and return the output of `spbench trace`.

    Args:
        step: "FILE.py:FUNCTION".
        clusters, world_sizes: one of each.
        ranks: ranks that are traced and written in addition to the first of each class; None: all.
        output: the file of the timeline (.json or .json.gz), or a folder that also keeps the row.

    Raises:
        UserError: the step cannot be watched, with the user's line; or an option is missing.
    """
    refuse_given(_OF_CELLS, "chooses among the cells of a scenario, and has no effect on a step of your own")
    if len(clusters) != 1 or len(world_sizes) != 1:
        raise UserError(f"{step}: give one --world-size and one --cluster, such as --cluster dgx-h100")
    world = world_sizes[0]
    every = None if None in ranks else [rank for rank in ranks if rank is not None]
    remark(f"tracing {step}")
    measured = measure.measured_step(step, world, clusters[0], every)
    folder = not {".json", ".gz"} & {*output.suffixes}
    timeline = output / "trace.json" if folder else output
    written = [*(range(world) if every is None else every)] or [ranks[0] for ranks in measured.classes.ranks]
    files = [measured.keep(output)] if folder else []
    banded = measure.with_band(measured.row)["measurement"]
    if measured.measurement.step_time_s:
        files.append(measured.timeline.export(timeline, written))
    if measured.measurement.unpriced_operators:
        names = ", ".join(sorted(measured.measurement.unpriced_operators))
        message(
            f"spbench: warning: priced by their bytes alone, without FLOPs: {names}; if one does matmuls, "
            "torch.utils.flop_counter.register_flop_formula(torch.ops.ns.name) tells its FLOPs"
        )
    return Output(
        [_verdict(measured, banded), held_table(measured), sent_table(measured)],
        {"row": {**measured.row, "measurement": banded}, "classes": str(measured.classes)},
        [measure.flat(measured.row)],
        files=files,
        code=int(measured.measurement.status != "ok"),
        details=[memory_table({measured.cell.key: measured.measurement.as_dict()})],
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
    if result.step_time_s:
        lines.append(
            f"step time {shown_band(banded)} simulated, most of it {result.bound}"
            + (f", MFU {three_digits(100 * result.mfu)}%" if result.mfu else "")
            + f"; {banded['band']}"
        )
        shares = {name.removesuffix("_s"): of / result.step_time_s for name, of in result.breakdown.items()}
        named = (
            f"{name.replace('_', ' ')} {shown_share(of)}"
            for name, of in shares.items()
            if of >= 0.005 and "hidden" not in name
        )
        lines.append(f"of the step: {', '.join(named)}")
    return "\n".join([*lines, str(measured.classes)])


def held_table(measured: measure.MeasuredStep) -> Table:
    """What is alive at the peak of the fullest rank, by kind and by the module and line that made it."""
    title = f"Alive at the peak of rank {measured.measurement.peak_rank}"
    return _TABLES.table("held", title, measured.held())


def sent_table(measured: measure.MeasuredStep) -> Table:
    """What the rank that sends most sends in a step, by phase, collective and axis."""
    return _TABLES.table("sent", "Communication of a step", measured.measurement.communication)
