"""The trace of a user's step on one of many fake ranks, and the classes of ranks that run the same program.

Classes are found by tracing: rank 0 first, whose process groups give a mesh; then, along each axis of the
mesh, a few further ranks. Along an axis on which these run rank 0's program, all ranks do; along another axis
ranks of every coordinate are traced.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.simulator.program import MATMUL, PRECISION_NAMES
from spbench.bench.measure.steps.fake_world import axes_of, fake_world
from spbench.bench.measure.steps.step_file import Build, OwnStep, Step, named_lines
from spbench.bench.measure.steps.step_recorder import StepRecorder, StepWatcher
from spbench.bench.measure.trace import torch_internals

#: steps that are traced; the last counts, because the first makes the optimizer's state
STEPS = 2
#: the most coordinates that are traced along an axis on which ranks differ
_MOST = 16


@dataclass(frozen=True)
class StepTrace:
    """The trace of one rank.

    Attributes:
        mesh: the sizes of the mesh, see :func:`mesh_of`.
        parameters: the number of parameters of all ranks together, as far as this rank can tell.
    """

    trace: Trace
    mesh: tuple[int, ...]
    parameters: int


def trace_step(step: OwnStep, cell: Cell, rank: int) -> StepTrace:
    """Build the step as ``rank``, run it :data:`STEPS` times, and return the trace of the last.

    Raises:
        UserError: the step raises, or does what cannot be watched; names the user's line.
    """
    torch_internals.check_internals()
    world = cell.sizes.world
    of_node = load_cluster(cell.cluster).devices_per_node
    # made before torch is patched, because it imports what walks over torch's functions
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    with (
        fake_world(rank, world, of_node) as (mesh, meshes),
        torch.random.fork_rng(devices=[]),
        no_cyclic_collection(),
    ):
        recorder = StepRecorder(mode, mesh, events=True)
        cache = torch_internals.disable_fake_tensor_cache(mode)
        build = step.load()  # unseen, because modules are imported once, for the first rank
        with mode, recorder, cache, torch_internals.too_large_unsupported(), named_lines(step.name):
            run, sizes, parameters = record_steps(partial(step.built, build), recorder, meshes, world)
            del run
        return StepTrace(Trace.of(cell, rank, recorder), sizes, parameters)


def record_steps(
    build: Build, recorder: StepWatcher, meshes: Sequence[DeviceMesh], world: int
) -> tuple[Step, tuple[int, ...], int]:
    """Build a step and run it :data:`STEPS` times under an entered recorder; returns (the step, the mesh and
    the parameters of :class:`StepTrace`)."""
    with recorder.building():
        run = build()
    parameters = recorder.tag_built()
    for number in range(1, STEPS + 1):
        recorder.communication.axes.update(axes_of(meshes, world))
        sizes = mesh_of([*torch_internals.groups_of_process().values()], world)
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
        matmul = program.category == MATMUL
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
class StepClasses:
    """The classes of ranks of a step.

    Attributes:
        traced: a trace for each class, of the class's first traced rank.
        ranks: for each class, its global ranks.
        tried: the ranks that were traced, in order.
    """

    traced: Sequence[StepTrace]
    ranks: Sequence[Sequence[int]]
    tried: Sequence[int]

    def __str__(self) -> str:
        world = sum(map(len, self.ranks))
        named = ", ".join(map(str, self.tried[:8])) + (", ..." if len(self.tried) > 8 else "")
        classes = "one class" if len(self.ranks) == 1 else f"{len(self.ranks)} classes"
        return f"rank{'s' * (len(self.tried) > 1)} {named} of {world} traced; {classes}"


def rank_classes(step: OwnStep, cell: Cell, ranks: Collection[int] | None = ()) -> StepClasses:
    """Trace enough ranks of a step to tell its classes.

    Args:
        ranks: further ranks that are traced; None: all.

    Raises:
        UserError: see :func:`trace_step`.
    """
    world = cell.sizes.world
    done: dict[int, StepTrace] = {}
    traces: list[StepTrace] = []  # a different program each
    of_rank: dict[int, int] = {}

    def class_of(rank: int) -> int:
        if rank not in done:
            done[rank] = trace_step(step, cell, rank)
            like = (n for n, each in enumerate(traces) if _alike(each, done[rank]))
            of_rank[rank] = next(like, len(traces))
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
        along.append([0] if same else _coordinates(size))
    program_of = np.zeros(world, dtype=np.int64)
    for corner in product(*along):
        kind = class_of(int(numbers[corner]))
        program_of[numbers[tuple(slice(at, None) for at in corner)]] = kind  # up to the next coordinate
    for rank, kind in of_rank.items():
        program_of[rank] = kind
    members = [np.flatnonzero(program_of == n).tolist() for n in range(len(traces))]
    return StepClasses(traces, members, sorted(done))


def _coordinates(size: int) -> list[int]:
    """The coordinates that are traced along an axis on which ranks differ, evenly spread if not all."""
    return sorted({*np.linspace(0, size - 1, min(size, _MOST)).astype(int).tolist()})


def _alike(one: StepTrace, other: StepTrace) -> bool:
    """Whether two ranks run the same program: equal storages, operators and communication at equal lines."""
    lines = [each.trace.program and each.trace.program.lines for each in (one, other)]
    return one.mesh == other.mesh and lines[0] == lines[1] and one.trace.same(other.trace)
