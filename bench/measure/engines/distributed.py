"""The distributed engine: N real processes, on this machine or on those of a torchrun job.

The first step runs under the same meters as on the virtual engine; the steps after it are timed without
them. Tensors are on CPUs, with Gloo, or on GPUs, with NCCL, as the cell says.

Training runs have the same global batches and the same initial weights whatever the strategy and sizes, so
that the curves of two cells differ only by how they compute.
"""

import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import OWN_STEP, Cell, Learning
from spbench.bench.measure.engines.class_traces import merged
from spbench.bench.measure.engines.engine import Engine
from spbench.bench.measure.engines.own_steps import record_steps
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.setup import build_training, rank_inputs, record_step
from spbench.bench.measure.engines.step_times import add_step_time, add_timed_steps, remark
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measure.processes.torchrun import check_gpus, ranks_for
from spbench.bench.measure.steps.fake_world import rank_of_world
from spbench.bench.measure.steps.step_file import OwnStep, named_lines
from spbench.bench.measure.steps.step_recorder import StepWatcher
from spbench.bench.measure.trace.meter import meter_classes
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measurement import Measurement
from spbench.impls import Strategy, all_reduce, initialize, model_preset

#: seed of the weights and the data, the same for every strategy and size
SEED = 1
#: seconds that a cell without a limit of its own may take: the default of torch's process groups
DEFAULT_LIMIT_S = 1800.0
#: Gloo's own thread drops its hold on a tensor a moment after the collective has ended; the metered step,
#: which is not timed, waits for that so that a death is noted when it is due
SETTLE_S = 0.002


class DistributedEngine(Engine):
    """Runs the step on N processes: real bytes, real peaks, measured times."""

    name = "distributed"
    summary = "real ranks: Gloo on CPUs, NCCL on GPUs, of this machine or under torchrun; measured time"
    runs_alone = True
    ends_in_time = True
    on_devices = real_tensors = runs_steps = True
    heeds = frozenset({"timing", "meters", "training.moments", "training.steps", "training.batch_on_device"})

    def measure(self, cell: Cell) -> Measurement:
        """The step time, communication and peak memory of a cell. The peaks are those of torch's caching
        allocator on GPUs, and those that the meters count on CPUs.

        Raises:
            Unsupported: the strategy cannot run these sizes; Unavailable: there are too few ranks or GPUs.
            RankError: a rank failed, ran out of memory or did not answer in time.
        """
        self.check(cell)
        planned, work = plan(cell), _measure_step if cell.strategy == OWN_STEP else measure_rank
        by_rank = [found for _, found in sorted(launch(cell, work).items())]
        result = merged(cell, by_rank, planned)
        result.ranks = [entry for found in by_rank for entry in found.ranks]
        result.reason = result.reason or remark(result.ranks)
        samples = by_rank[0].step_time_samples_s
        result.step_time_samples_s = samples
        add_step_time(result, cell, statistics.median(samples))
        return result

    def learn(self, cell: Cell) -> Measurement:
        """Train on real data, and return the losses of each step; status numerics if a loss is not finite.

        Raises:
            Unsupported: the strategy cannot run these sizes, or there is no data for the model.
            RankError: a rank failed, ran out of memory or did not answer in time.
        """
        return learned(cell, lambda: launch(cell, losses_of_rank)[0])


def learned(cell: Cell, losses_of_run: Callable[[], list[dict[str, float]]]) -> Measurement:
    """A measurement with the losses that ``losses_of_run()`` returns, which is called only if the cell can be
    trained; status numerics if a loss is not finite.

    Raises:
        Unsupported: the strategy cannot run these sizes, or there is no data for the model.
    """
    plan(cell)
    model_preset(*cell.model_arguments).batches(*cell.shape, seed=0)
    losses = losses_of_run()
    wrong = next((at["step"] for at in losses if not all(map(math.isfinite, at.values()))), None)
    if wrong is not None:
        return Measurement(status="numerics", reason=f"a loss at step {wrong} is not finite", losses=losses)
    return Measurement(losses=losses)


def launch(cell: Cell, work: Callable[[DeviceMesh, Cell], Any]) -> dict[int, Any]:
    """Call ``work(mesh, cell)`` on every rank of a cell, in new processes that end after the call; returns
    the results by rank.

    Args:
        work: a function at the top of a module, since the other processes import it.

    Raises:
        Unavailable: there are too few ranks or GPUs.
        RankError: a rank failed, ran out of memory or did not answer in time.
    """
    world = cell.sizes.world
    check_gpus(world, cell.device)
    with ranks_for(world, fresh=True) as ranks:
        limit = cell.timeout_s or DEFAULT_LIMIT_S
        results = ranks.run(cell.mesh_sizes, _on_rank, work, cell, timeout_s=limit, device=cell.device)
    return dict(enumerate(results))


def _on_rank(mesh: DeviceMesh, work: Callable[[DeviceMesh, Cell], Any], cell: Cell) -> Any:
    # ranks share the cores of a machine; more threads than cores would make each other wait
    here = int(os.environ.get("LOCAL_WORLD_SIZE", cell.sizes.world))
    torch.set_num_threads(max(1, usable_cores() // min(here, cell.sizes.world)))
    return work(mesh, cell)


def measure_rank(mesh: DeviceMesh, cell: Cell) -> Measurement:
    """Measure this rank: memory and communication in a metered step, then the times of further steps."""
    recorder = Recorder(mesh, settle_s=SETTLE_S, further=meter_classes(cell.meters))
    with recorder:
        generator, set_weights = torch.Generator().manual_seed(SEED), partial(initialize, seed=SEED)
        training, inputs = record_step(cell, mesh, recorder, generator, set_weights)
    trace = Trace.of(cell, dist.get_rank(), recorder)
    metered = trace.measurement(capacity=None)
    return add_timed_steps(
        metered, dist.get_rank(), lambda: training.step(inputs), cell.timing, mesh.device_type
    )


def _measure_step(mesh: DeviceMesh, cell: Cell) -> Measurement:
    """What :func:`measure_rank` measures, of a user's step, whose first steps are metered."""
    rank, world, own = dist.get_rank(), mesh.size(), OwnStep.of(cell)
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    with rank_of_world(rank, world, of_node, on_cpu=cell.device == "cpu") as meshes, named_lines(own.name):
        build, recorder = partial(own.built, own.load()), StepWatcher(mesh, settle_s=SETTLE_S)
        with no_cyclic_collection(), recorder:
            run, *_ = record_steps(build, recorder, meshes)
        metered = Trace.of(cell, rank, recorder).measurement(capacity=None)
        return add_timed_steps(metered, rank, run, cell.timing, mesh.device_type)


def losses_of_rank(mesh: DeviceMesh, cell: Cell, cls: type[Strategy] | None = None) -> list[dict[str, float]]:
    """Train on this rank; every rank returns the same :attr:`Measurement.losses`.

    Args:
        cls: the strategy's class, in place of the registered class with the name in the cell.
    """
    asked, model = cell.learning, model_preset(*cell.model_arguments)
    assert asked is not None
    # rounding depends on how many threads share a sum, and their number depends on the machine
    torch.set_num_threads(1)
    set_weights = partial(initialize, seed=asked.seed, deviation=asked.deviation)
    training, strategy, around = build_training(cell, mesh, set_weights, cls)
    # this rank's shares of the losses, over micro-batches; a stage of a pipeline without losses adds nothing
    losses = torch.zeros(len(model.losses), dtype=torch.float64, device=mesh.device_type)

    def add(module: nn.Module, inputs: object, outputs: dict[str, Tensor]) -> None:
        if "loss" in outputs:
            losses.add_(torch.stack([outputs[f"{name}_loss"].detach().double() for name in model.losses]))

    training.module.register_forward_hook(add)
    groups = [strategy.place.group(*strategy.position_axes), around.dp_group, around.pp_group]
    batches = model.batches(*cell.shape, seed=asked.seed)
    curves = []
    for step, batch in zip(range(1, asked.steps + 1), batches, strict=False):
        training.optimizer.set_learning_rate(learning_rate(asked, step))
        on_device = {name: x.to(mesh.device_type) for name, x in batch.items()}
        losses.zero_()
        training.step(rank_inputs(model, strategy, around, on_device))
        for group in groups:
            all_reduce(losses, group)
        curves.append({"step": step, **dict(zip(model.losses, losses.tolist(), strict=True))})
    return curves


def learning_rate(asked: Learning, step: int) -> float:
    """The learning rate of a step (from 1): a linear warm-up, then a linear decay to the last step."""
    top = max(1, asked.warmup)
    rising, falling = step / top, (asked.steps + 1 - step) / max(1, asked.steps + 1 - top)
    return asked.learning_rate * min(rising, falling)
