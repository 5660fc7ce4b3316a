"""The peak of a training step as torch's own MemTracker counts it, on fake tensors: an independent check."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.setup import set_up
from spbench.bench.measure.engines.tracing import fake_mesh


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
