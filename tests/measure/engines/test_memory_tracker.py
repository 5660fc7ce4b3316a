"""Peaks are those of torch's own MemTracker, to the byte, for every strategy and backend. MemTracker hooks
itself into every module. There is nothing to compare with where that is refused (a module is called more than
once, as in a pipeline or in a second step), and where the hooks keep tensors alive that the step alone does
not (with checkpointing, or where the peak lies in backward: up to 1% of it), nor where some wait on the host,
which it does not tell apart. The peak of a training step as torch's own MemTracker counts it, on fake
tensors: an independent check."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.setup import set_up
from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.trace.memory_log import MemoryLog
from tests.measure.engines.short_cut_cells import SMALL
from tests.slow import mostly_slow

_ITERATED = {"pipeline", "dropout and checkpointing", "two steps", "checkpoints on the host"}
NAMES = SMALL.keys() - _ITERATED - {"fpdt"}


def unrounded_peak(log: MemoryLog) -> int:
    """The largest sum of bytes of live storages, without the granules of an allocator and the workspaces of
    libraries and kernels, which are no tensors."""
    events, sizes = np.asarray(log.events), np.asarray(log.sizes)
    sizes[[number for number, tag in log.tags.items() if tag == "workspaces"]] = 0
    return int(np.cumsum(np.sign(events) * sizes[np.abs(events) - 1]).max())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", mostly_slow(sorted(NAMES), "ring_self_attention", "lasp", "lasp under zero3", "ulysses")
)
def test_the_peak_is_that_of_torchs_own_tracker(name: str) -> None:
    assert unrounded_peak(tracing.trace(SMALL[name]).memory) == tracked_peak(SMALL[name])


def test_a_storage_that_is_missed_is_seen() -> None:
    log = tracing.trace(SMALL["ring_self_attention"]).memory
    assert log.tags
    log.sizes[next(iter(log.tags))] -= 4
    assert unrounded_peak(log) == tracked_peak(SMALL["ring_self_attention"]) - 4


def tracked_peak(cell: Cell, rank: int = 0) -> int:
    """Bytes of storages, not rounded, that MemTracker saw at most during set-up and a step of the rank."""
    with fake_mesh(cell.mesh_sizes, rank) as mesh, torch.random.fork_rng(devices=[]), FakeTensorMode():
        tracker = MemTracker()
        with tracker:
            training, inputs = set_up(cell, mesh)
            training.step(inputs, lambda phase: nullcontext())
        peak = tracker.get_tracker_snapshot("peak")
        # what stands on the meta device holds no memory
        (by_kind,) = (kinds for device, kinds in peak.items() if device.type != "meta")
    return int(by_kind["Total"])
