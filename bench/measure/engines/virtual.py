"""The virtual engine: the real training step of one rank of N, on fake tensors and a fake process group.

No data exists, so a laptop plays any rank of any world at the paper's full shapes. What is measured
comes from the same meters that watch real ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import trace_cache
from spbench.bench.measure.engines.deep_models import deep_trace
from spbench.bench.measure.engines.engine import Engine
from spbench.bench.measure.engines.garbage import no_cyclic_collection
from spbench.bench.measure.engines.pipeline_stages import NotAlike, Turns, put_together, same
from spbench.bench.measure.engines.plan import RankClass, plan, rank_classes, stage_module
from spbench.bench.measure.engines.setup import record_step, workspace_bytes
from spbench.bench.measure.engines.step_times import can_time
from spbench.bench.measure.engines.traces import ClassTraces, Trace
from spbench.bench.measure.processes.starting import environment_with
from spbench.bench.measure.trace.fast_recorder import FastRecorder
from spbench.bench.measure.trace.meter import meter_classes
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.trace.torch_internals import (
    FakeStore,
    FakeTensorMode,
    check_internals,
    disable_fake_tensor_cache,
    too_large_unsupported,
)
from spbench.bench.measurement import Measurement
from spbench.impls.axes import device_mesh, ranks_along
from spbench.impls.training.pipeline import forwards_ahead

#: environment variable: if set and not empty, every operator takes the plain path of :class:`Recorder`, every
#: layer, step of a ring and stage of a pipeline is run, no trace is read from disk, the allocator serves each
#: event, and every step of every rank is simulated (:mod:`measure.simulator.folding`,
#: :mod:`measure.simulator.fast_forward`)
PLAIN_TRACE = "SPBENCH_PLAIN_TRACE"


def only_plain_traces() -> AbstractContextManager[None]:
    """Inside, this process and those that it starts take the plain path; see :data:`PLAIN_TRACE`."""
    return environment_with({PLAIN_TRACE: "1"})


class VirtualEngine(Engine):
    """Traces one rank of each class of ranks that run the same program, and simulates the time of all."""

    name = "virtual"
    summary = "fake tensors on fake ranks: exact bytes and memory, simulated time; no GPU, no data"
    is_exact = True
    heeds = frozenset(
        {"meters", "training.moments", "training.steps", "training.batch_on_device", "training.alloc_retries"}
    )

    def check(self, cell: Cell) -> None:
        """As of other engines; searches on virtual ranks are those of :mod:`measure.engines`."""
        if cell.search is None:
            super().check(cell)

    def measure(self, cell: Cell) -> Measurement:
        """Peak and reserved memory, whether it fits the card, communication, and the step time where the
        cluster has rates.

        Raises:
            Unsupported: the strategy cannot run these sizes.
        """
        return trace_classes(cell, events=can_time(cell)).measurement()


@contextmanager
def fake_mesh(
    sizes: Mapping[str, int], rank: int, device: str = "cpu", backend: str = "fake"
) -> Iterator[DeviceMesh]:
    """A device mesh as ``rank`` of a world of fake ranks sees it.

    Args:
        sizes: ranks along each axis, in the order of the mesh; axes that are left out have one.
        device: type of the device on which tensors are.
        backend: of torch.distributed, whose groups need no other process.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; the virtual engine makes its own")
    dist.init_process_group(backend, rank=rank, world_size=ranks_along([*sizes], sizes), store=FakeStore())
    try:
        yield device_mesh(sizes, device)
    finally:
        dist.destroy_process_group()


def _plain() -> bool:
    return bool(os.environ.get(PLAIN_TRACE))


def trace(cell: Cell, rank: int = 0, *, events: bool = False) -> Trace:
    """Run the steps of ``rank`` on fake tensors and return what the meters saw, with the workspaces of the
    cell's cluster; with ``events`` also the order of operators and communication, which a step time needs.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    plan(cell)
    if cell.meters or _plain():
        made = _traced(cell, rank, events)
    else:

        def kept(one: Cell) -> Trace:
            return trace_cache.kept(one, rank, events, lambda: _traced(one, rank, events))

        # what is put together is not kept: that takes longer than putting it together again
        made = deep_trace(cell, rank, kept)
    return replace(made, memory=made.memory.with_workspaces(workspace_bytes(cell)))


def _traced(cell: Cell, rank: int, events: bool) -> Trace:
    check_internals()
    further = meter_classes(cell.meters)
    with fake_mesh(cell.mesh_sizes, rank) as mesh, torch.random.fork_rng(devices=[]), no_cyclic_collection():
        mode = FakeTensorMode()
        recorder: Recorder
        cache: AbstractContextManager[None]
        if further or _plain():
            recorder, cache = Recorder(mesh, events=events, further=further), nullcontext()
        else:
            # what it remembers stands before the mode's own cache, which would only cost its entries
            recorder, cache = FastRecorder(mode, mesh, events=events), disable_fake_tensor_cache(mode)
        with mode, recorder, cache, too_large_unsupported():
            record_step(cell, mesh, recorder)
        return Trace.of(cell, rank, recorder)


def trace_classes(cell: Cell, *, events: bool = False) -> ClassTraces:
    """Trace the first rank of each of a cell's rank classes.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    classes = rank_classes(cell)

    def traced(rank: int) -> Trace:
        return trace(cell, rank, events=events)

    if cell.sizes.pp == 1 or cell.meters or _plain():
        traces = [traced(each.first) for each in classes]
    else:
        traces = stage_traces(cell, classes, traced)
    return ClassTraces(cell, classes, traces, fold=not _plain())


def stage_traces(cell: Cell, classes: Sequence[RankClass], trace: Callable[[int], Trace]) -> list[Trace]:
    """The trace of the first rank of each of a cell's rank classes.

    Args:
        trace: traces a rank.
    """
    alike: dict[Hashable, dict[int, list[int]]] = {}
    for each in classes:
        ahead = forwards_ahead(cell.training.schedule, each.stage, cell.training.micro_batches)
        alike.setdefault(_form(cell, each), {}).setdefault(ahead, []).append(each.first)
    traces = {
        rank: replace(made, rank=rank)
        for by_ahead in alike.values()
        for ranks, made in _by_ahead(by_ahead, cell.training.micro_batches, trace)
        for rank in ranks
    }
    return [traces[each.first] for each in classes]


def _by_ahead(
    ranks: Mapping[int, Sequence[int]], micro_batches: int, trace: Callable[[int], Trace]
) -> Iterator[tuple[Sequence[int], Trace]]:
    """Ranks whose stages have the same form, and the trace of each of them.

    The two traced stages with the fewest micro-batches give the proof: the trace of the second, put together
    from that of the first, must equal the traced one in every field. If it does not, each stage is traced.

    Args:
        ranks: by how many micro-batches they run ahead; ranks that hold as many have one trace.
    """
    source: tuple[Trace, Turns] | None = None
    proved = False
    for ahead in sorted(ranks):
        turns, made = Turns(micro_batches, ahead), None
        if source is not None and turns.complete:
            try:
                made = put_together(*source, turns)
            except NotAlike:
                source, proved = None, False
        if made is None or not proved:
            traced = trace(ranks[ahead][0])
            if made is not None:
                proved = same(made, traced)
            if turns.complete and not proved:
                source = traced, turns
            made = traced
        yield ranks[ahead], made


def _form(cell: Cell, each: RankClass) -> Hashable:
    """What the trace of a rank depends on, beside how many micro-batches its stage holds: whether the stage
    is the first or the last, the rank's place in its strategy, and its modules with their settings."""
    if cell.training.schedule == "interleaved":
        return each.first
    modules = tuple(_settings(module) for module in stage_module(cell, each).modules())
    return each.stage.first, each.stage.last, tuple(each.coordinates.items()), modules


def _settings(module: nn.Module) -> Hashable:
    own = vars(module).items()
    plain = tuple((name, value) for name, value in own if isinstance(value, (bool, int, float, str)))
    shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in module.named_parameters(recurse=False))
    return type(module), plain, shapes
