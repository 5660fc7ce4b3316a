"""The traces of a cell's rank classes, and the measurement of the cell that follows from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.card_kernels import RatesUnknown
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.engines.plan import Plan, RankClass, model_parameters
from spbench.bench.measure.engines.rank_memory import limit_by_host, usable_memory_bytes
from spbench.bench.measure.engines.step_line import StepNumbers
from spbench.bench.measure.engines.step_times import add_simulated_time
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection, without_one
from spbench.bench.measure.engines.unlike_ranks import expert_load, imbalance, marked_axis
from spbench.bench.measure.simulator.message_matching import Deadlock
from spbench.bench.measure.simulator.simulate import Simulator
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measurement import Measurement
from spbench.bench.setting_values import StandIn
from spbench.impls import model_preset


def largest(by_rank: Sequence[Measurement]) -> Measurement:
    """The measurement of a rank that runs out of memory, or else the one with the largest peak."""
    return max(by_rank, key=lambda m: (m.status == "oom", m.peak_memory_bytes or 0))


def merged(cell: Cell, by_rank: Sequence[Measurement], planned: Plan) -> Measurement:
    """The measurement of a cell from the measurements of at least the first rank of each class.

    Memory is that of a rank that runs out of memory, or else of the rank with the largest peak. The status is
    oom if the ranks of a node hold more in host memory than the node has. Communication and closed form are
    those of the rank that sends most in that rank's pipeline stage (the last rank of a ring may send
    nothing). The status is mismatch if the bytes of any rank differ from its closed form.
    """
    worst = largest(by_rank)
    stage = planned.class_of(worst.peak_rank).stage
    of_stage = (m for m in by_rank if planned.class_of(m.peak_rank).stage == stage)
    sends = max(of_stage, key=lambda m: sum(entry["sent_bytes"] for entry in m.communication))
    changes = {
        "by_class": [entry for m in by_rank for entry in m.by_class if entry["rank"] == m.peak_rank],
        "communication": sends.communication,
        "formula": sends.formula,
        "formula_difference": [entry for m in by_rank for entry in m.formula_difference],
        "unpriced_operators": {name: n for m in by_rank for name, n in m.unpriced_operators.items()},
    }
    return mismatched(limit_by_host(worst.model_copy(update=changes), cell, by_rank, planned))


def mismatched(measurement: Measurement) -> Measurement:
    """The same measurement, with the status mismatch if meter and closed form disagree."""
    if differences := measurement.formula_difference:
        first = differences[0]
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        measurement.status = "mismatch"
        measurement.reason = (
            f"{first['phase']} {first['collective']} on rank {first['rank']}: "
            f"{first['metered_bytes']} bytes, {first['formula_bytes']} by the closed form{more}"
        )
    return measurement


@dataclass(frozen=True)
class ClassTraces:
    """A trace of the first rank of each of a cell's :func:`rank_classes`, in their order.

    Attributes:
        planned: the plan of the cell.
        fold: whether a simulation leaves out ranks with equal times, see :class:`Simulator`.
        of_all: the measurement of each class in a step of all micro-batches, if the traces have only a few.
        stood_in: the stand-ins of these traces, in addition to those of the cell.
    """

    cell: Cell
    planned: Plan
    traces: Sequence[Trace]
    fold: bool = True
    of_all: Sequence[Measurement] | None = None
    stood_in: Sequence[StandIn] = ()

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
            timeline = self.timeline if simulated is None else simulated()
        except RatesUnknown as error:
            measurement.reason = measurement.reason or f"no time: {error}"
        else:
            add_simulated_time(measurement, self.cell, timeline, self.stood_in)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step of all ranks.

        Raises:
            RatesUnknown: the cluster lacks a rate.
            UserError: messages of ranks never meet; names a user's lines.
        """
        try:
            return self.simulator()()
        except RatesUnknown:
            raise
        except ValueError as error:
            word = " never ends" if isinstance(error, Deadlock) else ""
            raise UserError(f"{self.cell.model}{word}: {error}") from error

    def memory_measurement(self) -> Measurement:
        """The cell's measurement without times."""
        padding = model_preset(*self.cell.model_arguments).padding(self.cell.shape[1])
        load = {"imbalance": imbalance(self.cell), "padding": padding, **expert_load(self.cell)}
        return merged(self.cell, self.by_class, self.planned).model_copy(update=load)

    @property
    def timed(self) -> bool:
        """Whether the order of events was recorded, which a step time needs."""
        return all(trace.program is not None for trace in self.traces)

    def without_one(self) -> Self:
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
