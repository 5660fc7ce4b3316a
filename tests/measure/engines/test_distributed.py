"""The distributed engine on this machine's CPUs."""

from __future__ import annotations

import os
import re
import statistics
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes, Timing
from spbench.bench.measure.engines import distributed
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.setup import record_step
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.strategies.base import Unsupported
from spbench.impls.training.step import initialize

CELL = Cell(
    model="bert-tiny",
    strategy="ring_self_attention",
    sizes=Sizes(sp=2),
    batch=3,
    seq_len=24,
    engine="distributed",
    timing=Timing(warmup=1, samples=4),
)


def test_two_ranks() -> None:
    measured = DistributedEngine().measure(CELL)
    assert (measured.status, measured.reason) == ("ok", "")
    assert len(measured.step_time_samples_s) == 4
    assert all(0 < sample < 60 for sample in measured.step_time_samples_s)
    assert measured.step_time_s == statistics.median(measured.step_time_samples_s)
    assert measured.tokens_per_s == 3 * 24 / measured.step_time_s
    assert measured.formula_difference == []
    expected = VirtualEngine().measure(CELL)
    assert measured.communication == expected.communication
    assert measured.formula == expected.formula
    assert measured.peak_memory_bytes is not None
    assert expected.peak_memory_bytes is not None
    # equal unless Gloo's thread held a tensor longer (see test_virtual); never less
    assert expected.peak_memory_bytes <= measured.peak_memory_bytes < 1.1 * expected.peak_memory_bytes
    assert sum(measured.peak_held.values()) == measured.peak_memory_bytes
    assert measured.reserved_memory_bytes == expected.reserved_memory_bytes


def test_a_rank_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = plan(CELL)
    monkeypatch.setattr(distributed, "plan", lambda cell: fine)  # in this process; the ranks find out
    wrong = {"strategy": "ulises", "timing": Timing(warmup=0, samples=1)}
    with pytest.raises(RankError, match="unknown strategy 'ulises'") as raised:
        DistributedEngine().measure(CELL.model_copy(update=wrong))
    assert re.fullmatch(r"rank [01]: KeyError: .unknown strategy 'ulises'; choices: .*", raised.value.reason)
    assert raised.value.status == "failed"


def threads_of_rank(mesh: DeviceMesh, cell: Cell) -> int:
    return torch.get_num_threads()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or usable_cores() < 2, reason="needs two cores")
def test_ranks_share_the_cores_that_they_may_use() -> None:
    """Not those of the machine, of which a container or Slurm may have given only some."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        cell = CELL.model_copy(update={"sizes": Sizes(), "strategy": "single"})
        assert distributed.launch(cell, threads_of_rank) == {0: 1}
    finally:
        os.sched_setaffinity(0, usable)


def test_unsupported_sizes_start_no_rank() -> None:
    with pytest.raises(Unsupported, match="length 25"):
        DistributedEngine().measure(CELL.model_copy(update={"seq_len": 25}))


def weights_after_the_metered_step(mesh: DeviceMesh, cell: Cell) -> tuple[bool, bool, int]:
    """Whether the weights are those of the seed before an update, finite after one; and the metered peak."""
    recorder = Recorder(mesh, settle_s=0.002)
    with recorder:
        training, _ = record_step(
            cell, mesh, recorder, torch.Generator().manual_seed(1), partial(initialize, seed=1)
        )
    log = recorder.memory.stop()
    updated = {name: p.detach().clone() for name, p in training.module.named_parameters()}
    initialize(training.module, 1)
    near = all((updated[n] - p).abs().max() < 1e-2 for n, p in training.module.named_parameters())
    return near, all(p.isfinite().all() for p in updated.values()), log.peak().nbytes


def test_the_metered_step_runs_on_real_weights_that_the_meter_does_not_see(pool: RankPool) -> None:
    cell = Cell(model="bert-tiny", strategy="single", batch=2, seq_len=24)
    near, finite, peak = pool.run({}, weights_after_the_metered_step, cell)[0]
    assert near
    assert finite
    assert peak == VirtualEngine().measure(cell).peak_memory_bytes
