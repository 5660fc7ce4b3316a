"""The distributed engine: N real processes on this machine, started by torchrun's own launcher.

The first step runs under the same meters as on the virtual engine; the steps after it are timed without
them. This form of the engine uses Gloo on CPUs.
"""

from __future__ import annotations

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
from spbench.bench.engines.engine import Engine
from spbench.bench.engines.plan import plan
from spbench.bench.engines.setup import record_step
from spbench.bench.engines.traces import Trace, add_step_time, merged
from spbench.bench.meters.recorder import Recorder
from spbench.bench.meters.registry import meter_classes
from spbench.bench.processes import (
    START_METHOD,
    Surroundings,
    end_with_parent,
    starting_context,
    usable_cores,
    write_stacks_on_signal,
)
from spbench.impls.axes import device_mesh

#: of weights and data, the same for every strategy and size
SEED = 1
#: Gloo's own thread drops its hold on a tensor a moment after the collective has ended; the metered step,
#: which is not timed, waits for that so that a death is noted when it is due
_SETTLE_S = 0.002


class DistributedEngine(Engine):
    """Runs the step on N processes of this machine: real bytes, real peaks, measured times."""

    name = "distributed"
    summary = "real ranks: Gloo processes on this machine's CPUs; measured time"
    runs_alone = True

    def measure(self, cell: Cell) -> Measurement:
        """Step time, communication, and peak memory as the meters count it.

        Raises:
            Unsupported: the strategy cannot run these sizes.
            torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed.
        """
        plan(cell)
        by_rank = [found for _, found in sorted(launch(cell, measure_rank).items())]
        result = merged(cell, by_rank)
        samples = by_rank[0].step_time_samples_s
        result.step_time_samples_s = samples
        add_step_time(result, cell, statistics.median(samples))
        return result

    def learn(self, cell: Cell) -> Measurement:
        from spbench.bench.engines.learning import learn

        return learn(cell)


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
        start_method=START_METHOD,
    )
    starting_context()
    return elastic_launch(config, _rank_main)(Surroundings(), work, cell.model_dump())


def _rank_main(
    surroundings: Surroundings, work: Callable[[DeviceMesh, Cell], Any], dumped: dict[str, Any]
) -> Any:
    """What each rank runs; the launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    end_with_parent()
    surroundings.take_on()
    write_stacks_on_signal(f"rank {os.environ['RANK']}")
    cell = Cell.model_validate(dumped)
    # ranks share the cores; more threads than cores would make each other wait
    torch.set_num_threads(max(1, usable_cores() // cell.sizes.world))
    dist.init_process_group("gloo")
    try:
        return work(device_mesh(cell.mesh_sizes), cell)
    finally:
        dist.destroy_process_group()


def measure_rank(mesh: DeviceMesh, cell: Cell) -> Measurement:
    """Measure one rank: its memory and communication in a metered step, then the times of further steps."""
    recorder = Recorder(mesh, settle_s=_SETTLE_S, further=meter_classes(cell.meters))
    with recorder:
        training, inputs = record_step(cell, mesh, recorder, torch.Generator().manual_seed(SEED), SEED)
    trace = Trace.of(cell, dist.get_rank(), recorder)
    for _ in range(cell.timing.warmup):
        training.step(inputs)
    samples = [_timed(lambda: training.step(inputs)) for _ in range(cell.timing.samples)]
    measurement = trace.measurement(capacity=None)
    measurement.step_time_samples_s = samples
    return measurement


def _timed(step: Any) -> float:
    """Seconds from when all ranks are ready to when the slowest has finished."""
    dist.barrier()
    start = time.perf_counter()
    step()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)
