"""The distributed engine: N real processes on this machine, started by torchrun's own launcher.

The first step runs under the same meters as on the virtual engine; the steps after it are timed without
them. This form of the engine uses Gloo on CPUs.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spbench.bench.cell import Cell, Measurement
from spbench.bench.engines.setup import alike_ranks, mesh_axes, plan, record_step, telling_set
from spbench.bench.meters.allocator import replay
from spbench.bench.meters.recorder import Recorder
from spbench.impls.axes import device_mesh

#: of weights and data, the same for every strategy and size
SEED = 1
#: Gloo's own thread drops its hold on a tensor a moment after the collective has ended; the metered step,
#: which is not timed, waits for that so that a death is noted when it is due
_SETTLE_S = 0.002


def run(cell: Cell) -> Measurement:
    """Measure a cell on real ranks: step time, communication, and peak memory as the meters count it.

    Peak memory is the maximum over ranks; communication is the first rank's, or with pipeline stages that of
    the rank with the peak (mean bytes over ranks where a ring does not divide evenly).

    Raises:
        Unsupported: the strategy cannot run these sizes.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed.
    """
    planned = plan(cell)
    by_rank = launch(cell, measure_rank)
    rank, worst = max(by_rank.items(), key=lambda item: item[1]["peak_memory_bytes"])
    telling = telling_set(cell, rank)
    samples = by_rank[0]["step_time_samples_s"]
    step_time_s = statistics.median(samples)
    return Measurement(
        peak_memory_bytes=worst["peak_memory_bytes"],
        reserved_memory_bytes=worst["reserved_memory_bytes"],
        peak_phase=worst["peak_phase"],
        peak_rank=rank,
        peak_held=worst["peak_held"],
        communication=by_rank[alike_ranks(cell)[telling].ranks[0]]["communication"],
        formula=planned.formula(telling),
        formula_difference=[entry for result in by_rank.values() for entry in result["formula_difference"]],
        step_time_s=step_time_s,
        step_time_samples_s=samples,
        tokens_per_s=math.prod(cell.shape) / step_time_s,
        samples_per_s=cell.shape[0] / step_time_s,
    )


def launch(cell: Cell, work: Callable[[DeviceMesh, Cell], Any]) -> dict[int, Any]:
    """Call ``work(mesh, cell)`` on every rank of a cell; returns what each returned, by rank.

    Args:
        work: a function of a module, since other processes import it.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=cell.sizes.world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # the system chooses the port
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    return elastic_launch(config, _rank_main)(work, cell.model_dump())


def _rank_main(work: Callable[[DeviceMesh, Cell], Any], dumped: dict[str, Any]) -> Any:
    """What each rank runs; the launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    cell = Cell.model_validate(dumped)
    # ranks share the cores; more threads than cores would make each other wait
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // cell.sizes.world))
    dist.init_process_group("gloo")
    try:
        return work(device_mesh(cell.sizes.by_axis), cell)
    finally:
        dist.destroy_process_group()


def measure_rank(mesh: DeviceMesh, cell: Cell) -> dict[str, Any]:
    """What one rank measures."""
    recorder = Recorder(mesh_axes(mesh), settle_s=_SETTLE_S)
    with recorder:
        training, inputs = record_step(cell, mesh, recorder, torch.Generator().manual_seed(SEED), SEED)
    log = recorder.memory.stop()
    for _ in range(cell.timing.warmup):
        training.step(inputs)
    samples = [_timed(lambda: training.step(inputs)) for _ in range(cell.timing.samples)]
    peak = log.peak()
    return {
        "peak_memory_bytes": peak.nbytes,
        "reserved_memory_bytes": replay(log.sizes, log.events, None).peak_reserved,
        "peak_phase": peak.phase,
        "peak_held": peak.held,
        "communication": recorder.communication.rows(),
        "formula_difference": plan(cell).difference(recorder.communication, _set_of(cell, dist.get_rank())),
        "step_time_samples_s": samples,
    }


def _set_of(cell: Cell, rank: int) -> int:
    """Which of :func:`alike_ranks` a rank is in."""
    return next(which for which, alike in enumerate(alike_ranks(cell)) if rank in alike.ranks)


def _timed(step: Any) -> float:
    """Seconds from when all ranks are ready to when the slowest has finished."""
    dist.barrier()
    start = time.perf_counter()
    step()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)
