"""The trace of a rank: the real training step of one rank of N, on fake tensors and a fake process group.

No data exists, so a laptop plays any rank of any world at the paper's full shapes. What is measured
comes from the same meters that watch real ranks.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.deepened_traces import DeepTrace, Effort, few_layers
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.setup import record_step, workspace_bytes
from spbench.bench.measure.engines.traces import Trace, making
from spbench.bench.measure.processes.starting import MEET, environment_with
from spbench.bench.measure.trace.meter import meter_classes
from spbench.bench.measure.trace.recorder import FastRecorder, Recorder
from spbench.bench.measure.trace.torch_internals import (
    FakeStore,
    FakeTensorMode,
    check_internals,
    disable_fake_tensor_cache,
    too_large_unsupported,
)
from spbench.impls import Ahead, Turns, Unsupported, device_mesh, whole_mesh

#: environment variable: if set and not empty, every operator takes the plain path of :class:`Recorder`, every
#: layer, step of a ring and stage of a pipeline is run, no trace is read from disk, and every
#: rank is simulated (:mod:`measure.simulator.simulate`)
PLAIN_TRACE = "SPBENCH_PLAIN_TRACE"

_log = logging.getLogger(__name__)


@contextmanager
def no_cyclic_collection() -> Iterator[None]:
    """Leave reference cycles alone: what dies in a trace must die by the program, not when Python looks for
    garbage; and while a million events are timed, it would look at all that is made, and find none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def only_plain_traces() -> AbstractContextManager[None]:
    """Inside, this process and those that it starts take the plain path; see :data:`PLAIN_TRACE`."""
    return environment_with({PLAIN_TRACE: "1"})


def takes_plain_path() -> bool:
    """Whether this process takes the plain path; see :data:`PLAIN_TRACE`."""
    return bool(os.environ.get(PLAIN_TRACE))


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
    ranks = prod(whole_mesh(sizes).values())
    with environment_with({MEET: "0"}):  # nobody else comes to the store
        dist.init_process_group(backend, rank=rank, world_size=ranks, store=FakeStore())
        try:
            yield device_mesh(sizes, device)
        finally:
            dist.destroy_process_group()


def trace(
    cell: Cell,
    rank: int = 0,
    *,
    events: bool = False,
    effort: Effort = "proved",
    checked: bool = False,
    turns: Turns | Ahead | None = None,
) -> Trace:
    """Run the steps of ``rank`` on fake tensors and return what the meters saw, with the workspaces of the
    cell's cluster; with ``events`` also the order of operators and communication, which a step time needs.

    Args:
        effort: how many layers are run. "whole": all. "proved": those of models of 3, 4 and 5 layers, from
            which a deep one is put together where that is proved to be exact; else all. "guess": those of
            models of 3 and 5 layers, from which a deep one is put together without a proof where it can be;
            else all. "few": the model of 3 layers alone in place of a guess, which says as well which program
            runs. Further meters, and the plain path (:data:`PLAIN_TRACE`), see all layers.
        checked: whether the cell was planned already, which takes as long as to build all of its modules.
        turns: see :func:`record_step`.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    if not checked:
        plan(cell)
    if cell.meters or takes_plain_path():
        rank_trace = _traced(cell, rank, events, turns)
    else:
        # what is put together is not kept: that takes longer than putting it together again
        together = _put_together(cell, rank, events, effort, turns)
        rank_trace = together or _kept(cell, rank, events, turns)
    return replace(rank_trace, memory=rank_trace.memory.with_workspaces(workspace_bytes(cell)))


#: :func:`trace` at the door, where a room has that name
trace_rank = trace


def _put_together(
    cell: Cell, rank: int, events: bool, effort: Effort, turns: Turns | Ahead | None
) -> Trace | None:
    """The trace put together from those of few layers; None where that is not quicker, or not exact."""
    try:
        few = few_layers(cell, rank, effort)
        if few is None:
            return None
        if effort == "few":
            return _kept(few.sources[0], rank, events, turns)
        deep = DeepTrace(*(_kept(each, rank, events, turns) for each in few.sources), grows=few.grows)
        if few.proof is not None:
            ours, theirs = deep.by(1), _kept(few.proof, rank, events, turns)
            if not ours.same(theirs) or ours.memory.places != theirs.memory.places:
                raise NotAlike("what is put together is not what is traced")
        return replace(deep.by(few.more), cell=cell)
    except (NotAlike, Unsupported) as error:
        _log.info("%s is traced with all layers: %s", cell.key, error)
        return None


def _kept(cell: Cell, rank: int, events: bool, turns: Turns | Ahead | None = None) -> Trace:
    """The trace with all layers of the cell, from disk if it is there."""
    with making(cell, rank, events, turns) as kept:
        if kept.trace is None:
            kept.trace = _traced(cell, rank, events, turns)
    return kept.trace


def _traced(cell: Cell, rank: int, events: bool, turns: Turns | Ahead | None = None) -> Trace:
    check_internals()
    further = meter_classes(cell.meters)
    with fake_mesh(cell.mesh_sizes, rank) as mesh, torch.random.fork_rng(devices=[]), no_cyclic_collection():
        mode = FakeTensorMode()
        recorder: Recorder
        cache: AbstractContextManager[None]
        if further or takes_plain_path():
            recorder, cache = Recorder(mesh, events=events, further=further), nullcontext()
        else:
            # what it remembers stands before the mode's own cache, which would only cost its entries
            recorder, cache = FastRecorder(mode, mesh, events=events), disable_fake_tensor_cache(mode)
        with mode, recorder, cache, too_large_unsupported():
            record_step(cell, mesh, recorder, turns=turns)
        return Trace.of(cell, rank, recorder)
