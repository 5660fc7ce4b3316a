"""The measurement of a user's step: the row of a cell, whose model is the step.

A user's step on real ranks, of this machine or under torchrun: the meters that watch fake ranks watch its
first steps, so that virtual numbers can be held against real ones, and further steps are timed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import OWN_STEP, Cell, Sizes
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.card_kernels import RatesUnknown
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.distributed import SETTLE_S, launch
from spbench.bench.measure.engines.plan import Plan, RankClass
from spbench.bench.measure.engines.rank_memory import limit_by_host
from spbench.bench.measure.engines.setup import workspace_bytes
from spbench.bench.measure.engines.step_times import (
    add_parts,
    add_rates,
    add_timed_steps,
    remark,
    utilization,
)
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.engines.virtual import largest
from spbench.bench.measure.memory.allocator import rounded
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.simulator.message_matching import Deadlock
from spbench.bench.measure.simulator.simulate import Simulator
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measure.steps.fake_world import rank_of_world
from spbench.bench.measure.steps.step_file import Build, OwnStep, named_lines
from spbench.bench.measure.steps.step_recorder import StepWatcher
from spbench.bench.measure.steps.traced_step import (
    StepClasses,
    StepTrace,
    precision_of,
    rank_classes,
    record_steps,
)
from spbench.bench.measure.sweep.results import RESULTS_FILE, ResultsFile
from spbench.bench.measure.sweep.sweep import as_row, digest
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import CommunicationMeter
from spbench.bench.measure.trust.fit_certainty import Certainty, certainty
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
        measured.mfu = utilization(self.cell, timeline.step_time_s, model)

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
        except RatesUnknown:
            raise
        except ValueError as error:
            word = " never ends" if isinstance(error, Deadlock) else ""
            raise UserError(f"{self.step.name}{word}: {error}") from error

    def held(self) -> list[dict[str, Any]]:
        """What is alive at the peak of the fullest rank, the largest first: ``bytes``, number of ``tensors``,
        their ``kind`` (a category of the log) and ``place``: the module and line that made them."""
        rank, traces = self.measurement.peak_rank, [each.trace for each in self.classes.traced]
        log = self._with_workspaces(next(each for each in traces if each.rank == rank)).memory
        live = log.levels(sizes := rounded(np.asarray(log.sizes, dtype=np.int64))).live
        at = log.step_start + int(np.argmax(live[log.step_start :]))
        kinds = np.asarray([MemoryLog.CATEGORIES.index(kind) for kind in log.categories()])
        return [
            {"bytes": nbytes, "kind": MemoryLog.CATEGORIES[kind], "place": place, "tensors": tensors}
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
        return verdict is None or verdict.word != "no"


def cell_of(own: OwnStep, world_size: int, cluster: str) -> Cell:
    """The cell of a step on so many ranks."""
    sizes = Sizes(dp=world_size)
    return Cell(model=own.name, strategy=OWN_STEP, sizes=sizes, cluster=cluster)


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


@dataclass(frozen=True)
class RealStep(MeasuredStep):
    """The measurement of a user's step on real ranks.

    Attributes:
        by_rank: the measurement of each rank. Peaks are those of torch's allocator on GPUs, and those that
            the meters count on CPUs.
    """

    by_rank: Sequence[Measurement] = ()

    @cached_property
    def measurement(self) -> Measurement:
        measured = self.merged(self.by_rank)
        measured.ranks = [entry for each in self.by_rank for entry in each.ranks]
        measured.reason = measured.reason or remark(measured.ranks)
        measured.step_time_samples_s = self.by_rank[0].step_time_samples_s
        measured.step_time_s = statistics.median(measured.step_time_samples_s)
        return measured


def real_step(step: str, world_size: int, cluster: str, device: str) -> RealStep:
    """Measure the step "FILE.py:FUNCTION" on so many real ranks.

    Args:
        cluster: the cluster of which the ranks are, for its cards' memory.
        device: "cpu" or "cuda".

    Raises:
        UserError: the step raises; names the user's line. Unavailable: there are too few ranks or GPUs.
    """
    own = OwnStep.of(step)
    cell = cell_of(own, world_size, cluster).model_copy(update={"engine": "distributed", "device": device})
    try:
        answers = launch(cell, partial(on_rank, os.path.abspath(step)))
    except RankError as error:
        raise UserError(error.reason) from error
    traced = [trace for trace, _ in answers.values()]
    ranks = [*range(world_size)]
    return RealStep(
        own, cell, StepClasses(traced, [[n] for n in ranks], ranks), [m for _, m in answers.values()]
    )


def on_rank(path: str, mesh: DeviceMesh, cell: Cell) -> tuple[StepTrace, Measurement]:
    """Measure this rank: memory and communication of metered steps, then the times of further steps."""
    rank, world, own = dist.get_rank(), mesh.size(), OwnStep.of(path)
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    with (
        rank_of_world(rank, world, of_node, on_cpu=cell.device == "cpu") as meshes,
        named_lines(own.name),
    ):
        build, recorder = partial(own.built, own.load()), StepWatcher(mesh, settle_s=SETTLE_S)
        with no_cyclic_collection(), recorder:
            run, sizes, parameters = record_steps(build, recorder, meshes, world)
        trace = Trace.of(cell, rank, recorder)
        metered = trace.measurement(None, plan_of(cell, [[rank]]))
        return StepTrace(trace, sizes, parameters), add_timed_steps(
            metered, rank, run, cell.timing, cell.device
        )
