"""The measurement of a user's step: the row of a cell, whose model is the step."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.card_kernels import RatesUnknown
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.plan import Plan, RankClass
from spbench.bench.measure.engines.rank_memory import limit_by_host
from spbench.bench.measure.engines.setup import workspace_bytes
from spbench.bench.measure.engines.step_times import add_parts, add_rates, share_of_peak
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.virtual import largest
from spbench.bench.measure.memory.allocator import rounded
from spbench.bench.measure.simulator.message_matching import Deadlock
from spbench.bench.measure.simulator.simulate import Simulator
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measure.steps.step_file import Build, OwnStep
from spbench.bench.measure.steps.traced_step import StepClasses, precision_of, rank_classes
from spbench.bench.measure.sweep.results import RESULTS_FILE, ResultsFile
from spbench.bench.measure.sweep.sweep import as_row, digest
from spbench.bench.measure.trace.memory_log import CATEGORIES
from spbench.bench.measure.trace.meter import CommunicationMeter
from spbench.bench.measure.trust.fit_certainty import NO, Certainty, certainty
from spbench.bench.measurement import Measurement, Outcome
from spbench.bench.row import Row
from spbench.impls import Stage


class _OwnPlan(Plan):
    """The plan of a step whose closed form nobody knows."""

    def difference(
        self, meter: CommunicationMeter, rank: int, *, has_values: bool = False
    ) -> list[dict[str, Any]]:
        return []


def plan_of(cell: Cell, ranks: Sequence[Sequence[int]]) -> Plan:
    """The plan of a step's cell; ``ranks`` are those of each class."""
    classes = [RankClass(Stage(), {}, tuple(each)) for each in ranks]
    return _OwnPlan(classes, [[] for _ in classes], cell.mesh_sizes)


@dataclass(frozen=True)
class MeasuredStep:
    """The measurement of a user's step on a cluster.

    Attributes:
        cell: the cell of its row.
        classes: the traces, by classes of ranks that run the same program.
    """

    step: OwnStep
    cell: Cell
    classes: StepClasses

    def on(self, cluster: str) -> MeasuredStep:
        """The same step on another cluster, from the same traces."""
        return replace(self, cell=self.cell.model_copy(update={"cluster": cluster}))

    @cached_property
    def measurement(self) -> Measurement:
        """Memory, communication and, if the cluster has rates and the step fits, the simulated time."""
        capacity = load_cluster(self.cell.cluster).usable_memory_bytes
        traces = [self._with_workspaces(each.trace) for each in self.classes.traced]
        measured = self.merged([trace.measurement(capacity, self._planned) for trace in traces])
        if measured.status == "ok":
            try:
                self._add_time(measured)
            except RatesUnknown as error:
                measured.reason = f"no time: {error}"
        return measured

    def merged(self, by_rank: Sequence[Measurement]) -> Measurement:
        """The measurement of all ranks from those of each class: the communication is that of the rank that
        sends most, the memory that of the fullest rank."""
        most = max(by_rank, key=lambda m: sum(entry["sent_bytes"] for entry in m.communication))
        changes = {
            "by_class": [entry for m in by_rank for entry in m.by_class],
            "communication": most.communication,
            "unpriced_operators": {name: n for m in by_rank for name, n in m.unpriced_operators.items()},
        }
        measured = largest(by_rank).model_copy(update=changes)
        return limit_by_host(measured, self.cell, by_rank, self._planned)

    def _add_time(self, measured: Measurement) -> None:
        """Set the simulated step time with its parts. The FLOPs of the model are three times those of forward
        if the step has a backward, as of a model that is trained whole."""
        timeline = self.timeline
        measured.step_time_s = timeline.step_time_s
        add_rates(measured, self.cell, timeline.breakdown, timeline.priced_by)
        add_parts(measured, timeline)
        forward, _, every = timeline.flops
        model = 3 * forward if every > forward else forward
        measured.flops = {"model": model, "forward": forward, "all": every}
        measured.mfu = share_of_peak(model, self.cell, timeline.step_time_s)

    @cached_property
    def _planned(self) -> Plan:
        return plan_of(self.cell, self.classes.ranks)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step of all ranks.

        Raises:
            RatesUnknown: the cluster lacks a rate.
            UserError: messages of ranks never meet; names the lines.
        """
        programs = [each.trace.program for each in self.classes.traced if each.trace.program is not None]
        parameters = max(each.parameters for each in self.classes.traced)
        try:
            cluster = load_cluster(self.cell.cluster)
            return Simulator(programs, self.classes.ranks, cluster, self.cell.precision, parameters)()
        except Deadlock as error:
            raise UserError(f"{self.step.name} never ends: {error}") from error
        except RatesUnknown:
            raise
        except ValueError as error:
            raise UserError(f"{self.step.name}: {error}") from error

    def held(self) -> list[dict[str, Any]]:
        """What is alive at the peak of the fullest rank, the largest first: ``bytes``, number of ``tensors``,
        their ``kind`` (:data:`CATEGORIES`) and the ``place``, the user's module and line that made them."""
        fullest = (
            each.trace for each in self.classes.traced if each.trace.rank == self.measurement.peak_rank
        )
        log = self._with_workspaces(next(fullest)).memory
        live = log.levels(sizes := rounded(np.asarray(log.sizes, dtype=np.int64))).live
        at = log.step_start + int(np.argmax(live[log.step_start :]))
        kinds = np.asarray([CATEGORIES.index(kind) for kind in log.categories()])
        return [
            {"bytes": nbytes, "kind": CATEGORIES[kind], "place": place, "tensors": tensors}
            for kind, place, nbytes, tensors in log.parts_after(at, sizes, kinds)
        ]

    def _with_workspaces(self, trace: Trace) -> Trace:
        memory = trace.memory.with_workspaces(workspace_bytes(self.cell))
        return replace(trace, cell=self.cell, memory=memory)

    @cached_property
    def row(self) -> Row:
        """The result row, as of a cell that a sweep has run."""
        measured = self.measurement
        outcome = Outcome(measured.status, measured.reason, measured.as_dict())
        return as_row(self.cell, outcome, {**digest(self.cell), "model": self.step.digest})

    def keep(self, folder: Path) -> Path:
        """Add the row to the results of a folder, in place of the step's earlier row there; returns the
        file."""
        with ResultsFile(folder) as results:
            results.append(self.row)
        return folder / RESULTS_FILE

    @property
    def verdict(self) -> Certainty | None:
        """Whether the step fits its cards, and why it is tight; None: the cluster's card has no limit."""
        return certainty(self.cell, self.measurement.as_dict())

    def fits(self, cluster: str | None = None) -> bool:
        """Whether the step fits the cards of a cluster; None: of its own. :attr:`verdict` says how surely."""
        verdict = (self if cluster is None else self.on(cluster)).verdict
        return verdict is None or verdict.word != NO


def cell_of(own: OwnStep, world_size: int, cluster: str) -> Cell:
    """The cell of a step on so many ranks."""
    settings: Mapping[str, Any] = {"model": own.name, "strategy": OWN_STEP, "sizes": {"dp": world_size}}
    return Cell.model_validate({**settings, "cluster": cluster})


def measured_step(
    step: str | Build, world_size: int, cluster: str, ranks: Collection[int] | None = ()
) -> MeasuredStep:
    """Measure a training step of the user's own, as one of many fake ranks, on no GPU.

    Args:
        step: "FILE.py:FUNCTION", or the function itself. It builds model, optimizer and inputs by torch
            alone, and returns a callable that does one training step; torch's default group exists.
        world_size: the number of ranks.
        cluster: the name or file of the cluster, whose cards and links the step is priced on.
        ranks: ranks that are traced in addition to those that tell the classes; None: all.

    Raises:
        UserError: the step cannot be watched; names the user's line.
    """
    own = OwnStep.of(step)
    if absent := [rank for rank in ranks or () if not 0 <= rank < world_size]:
        raise UserError(f"rank {absent[0]}: the step has ranks 0 to {world_size - 1}")
    cell = cell_of(own, world_size, cluster)
    classes = rank_classes(own, cell, ranks)
    precision = precision_of([each.trace for each in classes.traced])
    # torch reads either name, also from a step that sets it
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    conf = next(filter(None, map(os.environ.get, variables)), None)
    training = {"training": {"cuda_alloc_conf": conf}, "precision": precision}
    return MeasuredStep(own, Cell.model_validate({**cell.model_dump(), **training}), classes)
