"""A user's step on real ranks, of this machine or under torchrun: the meters that watch fake ranks watch its
first steps, so that virtual numbers can be held against real ones, and further steps are timed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.distributed import SETTLE_S, launch
from spbench.bench.measure.engines.step_times import add_timed_steps, remark
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.steps.fake_world import rank_of_world
from spbench.bench.measure.steps.measured_step import MeasuredStep, cell_of, plan_of
from spbench.bench.measure.steps.step_file import OwnStep, named_lines
from spbench.bench.measure.steps.step_recorder import StepWatcher
from spbench.bench.measure.steps.traced_step import StepClasses, StepTrace, record_steps
from spbench.bench.measurement import Measurement


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
