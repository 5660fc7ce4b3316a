"""The virtual engine: the real training step of one rank of N, on fake tensors and a fake process group.

No data exists, so a laptop plays any rank of any world at the paper's full shapes. What is measured
comes from the same meters that watch real ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from spbench.bench.cell import Cell, Measurement, Sizes
from spbench.bench.config.cluster import load_cluster
from spbench.bench.engines.setup import alike_ranks, mesh_axes, plan, record_step, telling_set
from spbench.bench.engines.timing import add_times, can_time
from spbench.bench.meters.allocator import MIB, replay
from spbench.bench.meters.event_log import TimelineMeter
from spbench.bench.meters.recorder import Recorder
from spbench.impls.axes import device_mesh


@contextmanager
def fake_mesh(sizes: Sizes, rank: int) -> Iterator[DeviceMesh]:
    """A device mesh as ``rank`` of a world of fake ranks sees it."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; the virtual engine makes its own")
    dist.init_process_group("fake", rank=rank, world_size=sizes.world, store=FakeStore())
    try:
        yield device_mesh(sizes.by_axis)
    finally:
        dist.destroy_process_group()


@contextmanager
def _no_cyclic_collection() -> Iterator[None]:
    """Leave reference cycles alone: what dies must die by the program, not when Python looks for garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def trace(cell: Cell, rank: int = 0, *, timeline: bool = False) -> Recorder:
    """Run one training step of ``rank`` on fake tensors and return what the meters saw; with ``timeline``
    the order of events too, which a step time needs.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    plan(cell)
    with fake_mesh(cell.sizes, rank) as mesh, torch.random.fork_rng(devices=[]), _no_cyclic_collection():
        recorder = Recorder(mesh_axes(mesh), timeline=TimelineMeter(mesh) if timeline else None)
        with FakeTensorMode(), recorder:
            record_step(cell, mesh, recorder)
        recorder.memory.stop()
    return recorder


def run(cell: Cell) -> Measurement:
    """Measure a cell: peak and reserved memory, whether it fits the card, communication, and the step time
    where the cluster has rates.

    One rank is traced of each set that runs the same program (a pipeline stage, or a role in it); see
    :func:`told` for what is told of them.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    members = [alike.ranks for alike in alike_ranks(cell)]
    timed = can_time(cell)
    recorders = [trace(cell, ranks[0], timeline=timed) for ranks in members]
    result = told(cell, [measure(cell, recorder, which) for which, recorder in enumerate(recorders)])
    programs = [recorder.timeline.program() for recorder in recorders if recorder.timeline is not None]
    if programs and result.status == "ok":
        add_times(result, cell, programs, members)
    return result


def told(cell: Cell, measurements: list[Measurement]) -> Measurement:
    """Of the measurements of :func:`alike_ranks` the one that is told: that with the largest peak, or one
    that runs out of memory, with what the most telling ranks of its stage send (the last of a ring may send
    nothing), and with what the closed form of any got wrong."""
    chosen = max(measurements, key=lambda m: (m.status == "oom", m.peak_memory_bytes or 0))
    telling = measurements[telling_set(cell, chosen.peak_rank)]
    chosen.communication, chosen.formula = telling.communication, telling.formula
    chosen.formula_difference = [entry for m in measurements for entry in m.formula_difference]
    return chosen


def measure(cell: Cell, recorder: Recorder, which: int = 0) -> Measurement:
    """What a trace of the first rank of a set of :func:`alike_ranks` means on the cell's cluster."""
    planned, log = plan(cell), recorder.memory.log
    peak = log.peak()
    card = replay(log.sizes, log.events, load_cluster(cell.cluster).usable_memory_bytes)
    measurement = Measurement(
        peak_memory_bytes=peak.nbytes,
        reserved_memory_bytes=card.peak_reserved,
        peak_phase=peak.phase,
        peak_rank=alike_ranks(cell)[which].ranks[0],
        peak_held=peak.held,
        communication=recorder.communication.rows(),
        formula=planned.formula(which),
        formula_difference=planned.difference(recorder.communication, which),
    )
    if card.out_of_memory is not None:
        error = card.out_of_memory
        measurement.status = "oom"
        measurement.reason = (
            f"no room for {error.requested / MIB:.0f} MiB with {error.allocated / MIB:.0f} MiB allocated "
            f"and {error.reserved / MIB:.0f} MiB reserved"
        )
    return measurement
