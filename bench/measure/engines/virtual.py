"""The virtual engine: one rank of each class of ranks is traced, and the time of all ranks is simulated."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.measure.engines.class_traces import ClassTraces
from spbench.bench.measure.engines.engine import Engine
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.own_steps import step_traces
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.rank_memory import usable_memory_bytes
from spbench.bench.measure.engines.step_line import StepNumbers, calls_on_line, counts_on_line, on_line
from spbench.bench.measure.engines.step_times import can_time
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import (
    ShortSteps,
    no_cyclic_collection,
    stage_traces,
    takes_plain_path,
)
from spbench.bench.measurement import Measurement

_log = logging.getLogger(__name__)


class VirtualEngine(Engine):
    """Traces one rank of each class of ranks with the same program, and simulates the time of all ranks."""

    name = "virtual"
    summary = "fake tensors on fake ranks: exact bytes and memory, simulated time; no GPU, no data"
    is_exact = True
    runs_steps = True
    heeds = frozenset({"meters"}) | frozenset(
        f"training.{name}" for name in ("moments", "steps", "batch_on_device", "alloc_retries", "cuda_graph")
    )

    def check(self, cell: Cell) -> None:
        """Refuse what :meth:`Engine.check` refuses, except searches, which need no probes on this engine."""
        if cell.search is None:
            super().check(cell)

    def measure(self, cell: Cell) -> Measurement:
        """A cell's peak and reserved memory, its status (oom if the memory does not fit the card), its
        communication, and its step time if the cluster has rates.

        Raises:
            Unsupported: the strategy cannot run these sizes.
        """
        if cell.strategy == OWN_STEP:
            traces = step_traces(cell)
            measurement, precision = traces.measurement(), traces.cell.precision
            if precision != cell.precision:
                other = f"priced in {precision}, as most of its matmuls are; set precision: {precision}"
                measurement.reason = measurement.reason or other
            return measurement
        return measured(cell)[0]


def trace_classes(cell: Cell, *, events: bool = False, short: ShortSteps | None = None) -> ClassTraces:
    """Trace the first rank of each of a cell's rank classes.

    Args:
        short: see :func:`stage_traces`.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    planned = plan(cell)
    traces = stage_traces(cell, planned.classes, events=events, short=short)
    return ClassTraces(cell, planned, traces, fold=not takes_plain_path())


def measured(
    cell: Cell, short: ShortSteps | None = None, *, also_too_large: bool = False
) -> tuple[Measurement, ClassTraces]:
    """(the measurement of a cell, its traces), with times if the cluster has rates and the step fits. For a
    cell of very many micro-batches the traces are those of a step with few.

    Args:
        short: see :func:`stage_traces`.
        also_too_large: add times even if the step does not fit.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    timed, short = can_time(cell), ShortSteps() if short is None else short
    if (counts := counts_on_line(cell)) and timed and not cell.meters and not takes_plain_path():
        try:
            return measured_on_line(cell, counts, short, also_too_large=also_too_large)
        except NotAlike as error:
            _log.info("%s is put together whole: %s", cell.key, error)
    traces = trace_classes(cell, events=timed, short=short)
    measurement = traces.memory_measurement()
    if also_too_large or measurement.status == "ok":
        traces.add_time(measurement)
    return measurement, traces


@no_cyclic_collection()
def measured_on_line(
    cell: Cell, counts: Sequence[int], short: ShortSteps, *, also_too_large: bool = False
) -> tuple[Measurement, ClassTraces]:
    """(the measurement of a cell with very many micro-batches, from three steps with few
    (:mod:`measure.engines.step_line`); the traces of the longest of the three steps).

    Args:
        counts: the three numbers of micro-batches.
        short, also_too_large: as of :func:`measured`.

    Raises:
        NotAlike: the three steps do not determine the cell's step.
        Unsupported: the strategy cannot run these sizes.
    """
    planned, micro_batches = plan(cell), cell.training.micro_batches
    classes = planned.classes
    few = [
        ClassTraces(cell, planned, stage_traces(cell, classes, events=True, micro_batches=n, short=short))
        for n in counts
    ]
    by_class = []
    for ranks, of_few in zip(classes, zip(*(each.traces for each in few), strict=True), strict=True):
        if (of_class := _class_on_line(few[-1], counts, of_few)) is None:
            whole = stage_traces(cell, [ranks], events=True, short=short)
            of_class = ClassTraces(cell, planned, whole).by_class[0]
        by_class.append(of_class)
    traces = replace(few[-1], of_all=by_class)
    measurement = traces.memory_measurement()
    if also_too_large or measurement.status == "ok":
        steps = (StepNumbers.of(each.simulator()()) for each in few)
        traces.add_time(measurement, lambda: on_line(counts, [*steps], micro_batches))
    return measurement, traces


def _class_on_line(of: ClassTraces, counts: Sequence[int], traces: Sequence[Trace]) -> Measurement | None:
    """The measurement of a rank class, from its traces with ``counts`` micro-batches; None if its memory
    differs between the traces, for example because tensors are kept of each micro-batch."""
    micro_batches = of.cell.training.micro_batches
    calls = calls_on_line(counts, [trace.communication.counts for trace in traces], micro_batches)
    operators = [trace.program.unpriced_calls() for trace in traces if trace.program is not None]
    unpriced = {"unpriced_operators": calls_on_line(counts, operators, micro_batches)}
    sent = traces[-1].communication.with_counts(calls)
    different = {id(trace.memory): replace(trace, communication=sent) for trace in traces}
    capacity = usable_memory_bytes(of.cell, of.planned)
    first, *others = (
        trace.measurement(capacity, of.planned).model_copy(update=unpriced) for trace in different.values()
    )
    return None if any(each != first for each in others) else first
