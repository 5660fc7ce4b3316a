"""The traces of a user's step on fake ranks, and the classes of ranks that run the same program.

Classes are found by tracing: rank 0 first, whose process groups give a mesh; then, along each axis of the
mesh, a few further ranks. Along an axis on which these run rank 0's program, all ranks do; along another axis
ranks of every coordinate are traced.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.engines.class_traces import ClassTraces, merged
from spbench.bench.measure.engines.plan import plan_of_step
from spbench.bench.measure.engines.setup import workspace_bytes
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import fake_mesh, no_cyclic_collection
from spbench.bench.measure.simulator.program import PRECISION_NAMES, Category
from spbench.bench.measure.simulator.simulate import Simulator
from spbench.bench.measure.steps.fake_world import axes_of, operators_of_gpus, rank_of_world
from spbench.bench.measure.steps.step_file import (
    STANDING_IN,
    Build,
    OwnStep,
    Step,
    named_lines,
    recorded_launches,
)
from spbench.bench.measure.steps.step_recorder import StepRecorder, StepWatcher
from spbench.bench.measure.trace import torch_internals
from spbench.bench.measurement import Measurement
from spbench.bench.setting_values import StandIn, read_model_file

#: steps that are traced; the last counts, because the first makes the optimizer's state
STEPS = 2
#: the most coordinates that are traced along an axis on which ranks differ, evenly spread if not all
_MOST = 16


@dataclass(frozen=True)
class StepTrace:
    """The trace of one rank.

    Attributes:
        mesh: the sizes of the mesh, see :func:`mesh_of`.
        parameters: the number of parameters of all ranks together, as far as this rank can tell.
        stood_in: work of the step in whose place the trace has other work, for example compiled code.
    """

    trace: Trace
    mesh: tuple[int, ...]
    parameters: int
    stood_in: frozenset[StandIn]


def trace_step(step: OwnStep, cell: Cell, rank: int) -> StepTrace:
    """Build the step as ``rank``, run it :data:`STEPS` times, and return the trace of the last.

    Raises:
        UserError: the step raises, or does what cannot be watched; names the user's line.
    """
    torch_internals.check_internals()
    world, of_node = cell.sizes.world, load_cluster(cell.cluster).devices_per_node
    # made before torch is patched, because it imports what walks over torch's functions
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    with (
        fake_mesh({"dp": world}, rank) as mesh,
        operators_of_gpus(),
        rank_of_world(rank, world, of_node) as meshes,
        recorded_launches(),
        torch.random.fork_rng(devices=[]),
        no_cyclic_collection(),
    ):
        recorder = StepRecorder(mode, mesh, events=True)
        cache = torch_internals.disable_fake_tensor_cache(mode)
        build = step.load()  # unseen, because modules are imported once, for the first rank
        with mode, recorder, cache, torch_internals.too_large_unsupported(), named_lines(step.name):
            run, sizes, parameters = record_steps(partial(step.built, build), recorder, meshes)
            del run
        return StepTrace(Trace.of(cell, rank, recorder), sizes, parameters, frozenset(STANDING_IN))


def record_steps(
    build: Build, recorder: StepWatcher, meshes: Sequence[DeviceMesh]
) -> tuple[Step, tuple[int, ...], int]:
    """Build a step and run it :data:`STEPS` times under an entered recorder; returns (the step, the mesh and
    the parameters of :class:`StepTrace`)."""
    with recorder.building():
        run = build()
    parameters = recorder.tag_built()
    for number in range(1, STEPS + 1):
        recorder.communication.axes.update(axes_of(meshes))
        sizes = mesh_of([*torch_internals.groups_of_process().values()], dist.get_world_size())
        if recorder.events is not None:
            recorder.events.on_mesh(sizes)
        fixed = nullcontext() if recorder.events is None else torch_internals.static_pipelines()
        with recorder.step(last=number == STEPS), fixed:
            run()
        recorder.tag_made()
    return run, sizes, parameters


def precision_of(traces: Sequence[Trace]) -> str:
    """The precision in which the ranks do most FLOPs of matmuls; "fp32" if there are none."""
    flops = np.zeros(len(PRECISION_NAMES))
    for program in (each.program for each in traces if each.program is not None):
        matmul = program.of(Category.MATMUL)
        flops += np.bincount(program.precision[matmul], program.flops[matmul], len(PRECISION_NAMES))
    most = PRECISION_NAMES[int(flops.argmax())] if flops.any() else "fp32"
    return {"fp8": "bf16"}.get(most, most)


def bounds_of(ranks: Sequence[int]) -> set[int] | None:
    """The distances at which a group of ranks cuts the world, so that a mesh whose axes end there has the
    group as a block of axes; None: the group is no such block."""
    bounds: set[int] = set()
    apart = [each - ranks[0] for each in sorted(ranks)]
    while len(apart) > 1:
        step = apart[1]
        run = next((n for n in range(1, len(apart)) if apart[n] != n * step), len(apart))
        places = (apart[n - n % run] + n % run * step for n in range(len(apart)))
        if len(apart) % run or [*places] != apart:
            return None
        bounds |= {step, step * run}
        apart = apart[::run]
    return bounds


def mesh_of(groups: Sequence[Sequence[int]], world: int) -> tuple[int, ...]:
    """The sizes of the coarsest mesh of ``world`` ranks of which each group is a block of axes, from the
    slowest axis to the fastest; (world,) if there is none."""
    every = [bounds_of(group) for group in groups]
    if None in every:
        return (world,)
    ordered = sorted({1, world}.union(*(each for each in every if each)))
    if any(larger % smaller for smaller, larger in pairwise(ordered)):
        return (world,)
    return tuple(larger // smaller for smaller, larger in pairwise(ordered))[::-1] or (1,)


@dataclass(frozen=True)
class StepTraces(ClassTraces):
    """The traces of a user's step.

    Attributes:
        cell: the cell with the precision of most matmuls, and the allocator's settings of the environment.
        traced: the trace of the first traced rank of each class.
        tried: the ranks that were traced, in order.
    """

    traced: Sequence[StepTrace] = ()
    tried: Sequence[int] = ()

    @classmethod
    def of(
        cls, cell: Cell, traced: Sequence[StepTrace], ranks: Sequence[Sequence[int]], tried: Sequence[int]
    ) -> Self:
        """The traces of classes of ``ranks``; each trace is then that of the first rank of the class."""
        # torch reads either name, also from a step that sets it
        variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        conf = next(filter(None, (cell.training.cuda_alloc_conf, *map(os.environ.get, variables))), None)
        training = {**cell.training.model_dump(), "cuda_alloc_conf": conf}
        precision = precision_of([each.trace for each in traced])
        cell = Cell.model_validate({**cell.model_dump(), "training": training, "precision": precision})
        workspaces = workspace_bytes(cell)
        traces = [
            replace(each.trace, cell=cell, rank=of[0], memory=each.trace.memory.with_workspaces(workspaces))
            for each, of in zip(traced, ranks, strict=True)
        ]
        stood_in = sorted({one for each in traced for one in each.stood_in})
        planned = plan_of_step(cell, ranks)
        return cls(cell, planned, traces, stood_in=stood_in, traced=traced, tried=tried)

    def on(self, cluster: str) -> Self:
        """The same step on another cluster."""
        cell = self.cell.model_copy(update={"cluster": cluster})
        return self.of(cell, self.traced, self.ranks, self.tried)

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks of each class."""
        return [[*each.ranks] for each in self.classes]

    def memory_measurement(self) -> Measurement:
        return merged(self.cell, self.by_class, self.planned)

    def simulator(self, cluster: Cluster | None = None) -> Simulator:
        programs = [each.program for each in self.traces if each.program is not None]
        parameters = max(each.parameters for each in self.traced)
        cluster = cluster or load_cluster(self.cell.cluster)
        return Simulator(programs, self.ranks, cluster, self.cell.precision, parameters)

    def held(self) -> list[dict[str, Any]]:
        """What is alive at the peak of the fullest rank, the largest first: ``bytes``, number of ``tensors``,
        their ``kind`` (a category of the log) and ``place``: the module and line that made them."""
        log = self.worst().memory
        return [
            {"bytes": nbytes, "kind": log.CATEGORIES[kind], "place": place, "tensors": tensors}
            for kind, place, nbytes, tensors in log.parts_at_peak()
        ]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.tried[:8])) + (", ..." if len(self.tried) > 8 else "")
        classes = "one class" if len(self.classes) == 1 else f"{len(self.classes)} classes"
        world = self.cell.sizes.world
        return f"rank{'s' * (len(self.tried) > 1)} {named} of {world} traced; {classes}"


def step_cell(step: str | Build, world_size: int, cluster: str) -> Cell:
    """The cell of a step, "FILE.py:FUNCTION" or the function itself, on so many ranks."""
    place = read_model_file(step) if isinstance(step, str) else {}
    own = {"model": OwnStep.of(step).name, "model_config_json": place, "strategy": OWN_STEP}
    return Cell.model_validate({**own, "sizes": {"dp": world_size}, "cluster": cluster})


def step_traces(
    cell: Cell, ranks: Collection[int] | None = (), function: str | Build | None = None
) -> StepTraces:
    """Trace enough ranks of a step to tell its classes.

    Args:
        ranks: further ranks that are traced; None: all.
        function: the step, if it is in no file.

    Raises:
        UserError: see :func:`trace_step`; or there is no such rank.
    """
    if absent := [rank for rank in ranks or () if not 0 <= rank < cell.sizes.world]:
        raise UserError(f"rank {absent[0]}: the step has ranks 0 to {cell.sizes.world - 1}")
    step = OwnStep.of(function or cell)
    world = cell.sizes.world
    done: dict[int, StepTrace] = {}
    traces: list[StepTrace] = []  # a different program each
    of_rank: dict[int, int] = {}

    def class_of(rank: int) -> int:
        if rank not in done:
            done[rank] = trace_step(step, cell, rank)
            own = done[rank]
            like = (each.mesh == own.mesh and each.trace.same(own.trace) for each in traces)
            of_rank[rank] = [*like, True].index(True)
            if of_rank[rank] == len(traces):
                traces.append(done[rank])
        return of_rank[rank]

    class_of(0)
    mesh = done[0].mesh
    for rank in range(world) if ranks is None else sorted({*ranks, world - 1}):
        class_of(rank)
    numbers = np.arange(world).reshape(mesh)
    along = []
    for axis, size in enumerate(mesh):
        line = np.moveaxis(numbers, axis, 0).reshape(size, -1)[:, 0].tolist()
        few = sorted({size // 2, size - 1} - {0})
        same = all(class_of(line[n]) == of_rank[0] for n in few)
        evenly = np.linspace(0, size - 1, min(size, _MOST)).astype(int)
        along.append([0] if same else sorted({*evenly.tolist()}))
    program_of = np.zeros(world, dtype=np.int64)
    for corner in product(*along):
        kind = class_of(int(numbers[corner]))
        program_of[numbers[tuple(slice(at, None) for at in corner)]] = kind  # up to the next coordinate
    for rank, kind in of_rank.items():
        program_of[rank] = kind
    members = [np.flatnonzero(program_of == n).tolist() for n in range(len(traces))]
    return StepTraces.of(cell, traces, members, sorted(done))
