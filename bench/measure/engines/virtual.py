"""The virtual engine: one rank of each class of ranks is traced, and the time of all ranks is simulated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.card_kernels import RatesUnknown
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.engines.engine import Engine
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.plan import Plan, RankClass, model_parameters, plan, sending_class
from spbench.bench.measure.engines.rank_memory import limit_by_host, usable_memory_bytes
from spbench.bench.measure.engines.step_line import (
    StepNumbers,
    calls_on_line,
    counts_on_line,
    on_line,
)
from spbench.bench.measure.engines.step_times import add_simulated_time, can_time
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import (
    ShortSteps,
    no_cyclic_collection,
    stage_traces,
    takes_plain_path,
    without_one,
)
from spbench.bench.measure.engines.unlike_ranks import expert_load, imbalance, marked_axis
from spbench.bench.measure.simulator.simulate import Simulator
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measurement import Measurement
from spbench.impls import model_preset

_log = logging.getLogger(__name__)


class VirtualEngine(Engine):
    """Traces one rank of each class of ranks with the same program, and simulates the time of all ranks."""

    name = "virtual"
    summary = "fake tensors on fake ranks: exact bytes and memory, simulated time; no GPU, no data"
    is_exact = True
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
        return measured(cell)[0]


def largest(by_rank: Sequence[Measurement]) -> Measurement:
    """The measurement of a rank that runs out of memory, or else the one with the largest peak."""
    return max(by_rank, key=lambda m: (m.status == "oom", m.peak_memory_bytes or 0))


def merged(cell: Cell, by_rank: Sequence[Measurement]) -> Measurement:
    """The measurement of a cell from the measurements of at least the first rank of each class.

    Memory is that of a rank that runs out of memory, or else of the rank with the largest peak. The status is
    oom if the ranks of a node hold more in host memory than the node has. Communication and closed form are
    those of the ranks that send most in that rank's pipeline stage (the last rank of a ring may send
    nothing). The status is mismatch if the bytes of any rank differ from its closed form.
    """
    worst = largest(by_rank)
    by_class = [entry for m in by_rank for entry in m.by_class if entry["rank"] == m.peak_rank]
    sender = sending_class(cell, worst.peak_rank).first
    sends = next(m for m in by_rank if m.peak_rank == sender)
    differences = [entry for m in by_rank for entry in m.formula_difference]
    changes = {
        "by_class": by_class,
        "communication": sends.communication,
        "formula": sends.formula,
        "formula_difference": differences,
        "unpriced_operators": {name: n for m in by_rank for name, n in m.unpriced_operators.items()},
    }
    measurement = worst.model_copy(update=changes)
    return mismatched(limit_by_host(measurement, cell, by_rank))


def mismatched(measurement: Measurement) -> Measurement:
    """The same measurement, with the status mismatch if meter and closed form disagree."""
    if measurement.formula_difference:
        measurement.status, measurement.reason = "mismatch", _mismatch(measurement.formula_difference)
    return measurement


def _mismatch(differences: Sequence[Mapping[str, Any]]) -> str:
    first = differences[0]
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return (
        f"{first['phase']} {first['collective']} on rank {first['rank']}: {first['metered_bytes']} bytes, "
        f"{first['formula_bytes']} by the closed form{more}"
    )


@dataclass(frozen=True)
class ClassTraces:
    """A trace of the first rank of each of a cell's :func:`rank_classes`, in their order.

    Attributes:
        planned: the plan of the cell.
        fold: whether a simulation leaves out ranks with equal times, see :class:`Simulator`.
        of_all: the measurement of each class in a step of all micro-batches, if the traces have only a few.
    """

    cell: Cell
    planned: Plan
    traces: Sequence[Trace]
    fold: bool = True
    of_all: Sequence[Measurement] | None = None

    @property
    def classes(self) -> Sequence[RankClass]:
        """The cell's rank classes."""
        return self.planned.classes

    @cached_property
    @no_cyclic_collection()
    def by_class(self) -> list[Measurement]:
        """The measurement of each class's first rank, without times."""
        if self.of_all is not None:
            return [*self.of_all]
        capacity = usable_memory_bytes(self.cell, self.planned)
        return [trace.measurement(capacity, self.planned) for trace in self.traces]

    def measurement(self) -> Measurement:
        """The cell's measurement, with times if the programs were recorded and the step fits."""
        measurement = self.memory_measurement()
        if measurement.status == "ok":
            self.add_time(measurement)
        return measurement

    @no_cyclic_collection()
    def add_time(
        self, measurement: Measurement, simulated: Callable[[], Timeline | StepNumbers] | None = None
    ) -> None:
        """Set a measurement's step time and its parts, if the programs were recorded; if the cluster lacks a
        rate that the programs need, the measurement's reason says so.

        Args:
            simulated: returns the simulated step; None: a simulation of these programs.
        """
        if not self.timed:
            return
        try:
            timeline = self.simulator()() if simulated is None else simulated()
        except RatesUnknown as error:
            measurement.reason = measurement.reason or f"no time: {error}"
        else:
            add_simulated_time(measurement, self.cell, timeline)

    def memory_measurement(self) -> Measurement:
        """The cell's measurement without times."""
        load = {"imbalance": imbalance(self.cell), **expert_load(self.cell)}
        return merged(self.cell, self.by_class).model_copy(update=load)

    @property
    def timed(self) -> bool:
        """Whether the order of events was recorded, which a step time needs."""
        return all(trace.program is not None for trace in self.traces)

    def without_one(self) -> ClassTraces:
        """These traces with programs of one micro-batch less; see :func:`.tracing.without_one`.

        Raises:
            NotAlike: the traces do not determine those programs.
        """
        return replace(self, traces=without_one(self.cell, self.classes, self.traces))

    def worst(self) -> Trace:
        """The trace of a class that runs out of memory, or else of the class with the largest peak."""
        return self.traces[self.by_class.index(largest(self.by_class))]

    def simulator(self, cluster: Cluster | None = None) -> Simulator:
        """A simulator of all ranks. ``cluster`` replaces the cell's cluster.

        Raises:
            RatesUnknown: the cluster lacks a figure.
            ValueError: the programs were not recorded.
        """
        axis = marked_axis(self.cell)
        programs = [trace.program for trace in self.traces if trace.program is not None]
        if len(programs) < len(self.traces):
            raise ValueError(f"{self.cell.key} was traced without its events, which a simulation needs")
        return Simulator(
            programs,
            [each.ranks for each in self.classes],
            cluster or load_cluster(self.cell.cluster),
            self.cell.precision,
            model_parameters(self.cell),
            self.fold,
            model_preset(*self.cell.model_arguments).attention_kernel,
            None if axis is None else [*self.cell.mesh_sizes].index(axis),
            self.cell.training.cuda_graph,
        )


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
