"""What the machine at hand can do, measured: the rates that the cluster `local` leaves open.

They are measured on as many ranks as a cell has, all doing the same at once and each with the threads that
the distributed engine gives it. So what ranks share (cores, caches, memory) is in the rates: four ranks on
two cores get about half a core each. A burst is timed until the slowest rank has finished it, and is long
beside a time slice of the system, or else a rank on a shared core could end before its turn is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes
from spbench.bench.engines import distributed, virtual
from spbench.bench.engines.setup import set_up
from spbench.bench.files.cluster import Cluster, Figure, load_cluster
from spbench.bench.simulator.program import KERNEL
from spbench.impls.collectives import exchange
from spbench.impls.training.step import PRECISIONS, initialize

#: a matrix of the products, [SIDE, SIDE]; about what a small transformer's layers multiply
SIDE = 512
#: of a sum of two tensors; more than a core's caches hold, and new memory for the result as for an activation
SUMMED_BYTES = 2**24
#: of the large message between two ranks
MESSAGE_BYTES = 2**22
#: a training step whose tensors are so small that only calls cost time
SMALL = Cell(model="bert-tiny", strategy="single", batch=1, seq_len=8)


@dataclass(frozen=True)
class Bursts:
    """Times that a burst repeats what it measures, and bursts of which the quickest counts."""

    products: int = 100
    sums: int = 20
    steps: int = 20
    small_messages: int = 100
    large_messages: int = 10
    samples: int = 5


@dataclass(frozen=True)
class Times:
    """Seconds of one rank, while all ranks do the same; those of messages are None for a rank alone."""

    product_s: float
    sum_s: float
    small_step_s: float
    small_message_s: float | None = None
    large_message_s: float | None = None


def measure_times(mesh: DeviceMesh, cell: Cell, bursts: Bursts = Bursts()) -> Times:
    """Measure on this rank, together with all others of the mesh; the answer is the same on all."""
    dtype, group = PRECISIONS[cell.precision].parameters, dist.group.WORLD
    assert group is not None
    a, b = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
    x, y = (torch.randn(SUMMED_BYTES // dtype.itemsize).to(dtype) for _ in range(2))
    # strategy single: each rank has a model of its own, and they do not talk
    training, inputs = set_up(cell, mesh, torch.Generator().manual_seed(distributed.SEED))
    initialize(training.module, distributed.SEED)
    size, rank, messages = group.size(), group.rank(), []
    if size > 1:
        for nbytes, repeats in ((1, bursts.small_messages), (MESSAGE_BYTES, bursts.large_messages)):
            sent, received = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
            to_next, from_previous = [(sent, (rank + 1) % size)], [(received, (rank - 1) % size)]
            pass_on = partial(exchange, to_next, from_previous, group)
            messages.append(_seconds(pass_on, repeats, bursts.samples))
    return Times(
        _seconds(lambda: a @ b, bursts.products, bursts.samples),
        _seconds(lambda: x + y, bursts.sums, bursts.samples),
        _seconds(lambda: training.step(inputs), bursts.steps, bursts.samples),
        *messages,
    )


def _seconds(work: Callable[[], Any], repeats: int, samples: int) -> float:
    """Of one piece of work, in bursts that end when the slowest rank has; the first burst warms up, and the
    least of the others counts, since whatever else the machine does can only add to it."""
    taken = []
    for _ in range(samples + 1):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        taken.append(float(elapsed) / repeats)
    return min(taken[1:])


def measured_cluster(world: int, precision: str = "fp32") -> Cluster:
    """The cluster `local` with this machine's rates for ranks of a world of that size."""
    cell = SMALL.model_copy(update={"sizes": Sizes(sp=world), "precision": precision})
    times = distributed.launch(cell, measure_times)[0]
    alone = cell.model_copy(update={"sizes": Sizes()})
    program = virtual.trace(alone, events=True).program
    assert program is not None
    kernels = int((program.kind == KERNEL).sum())
    return cluster_of(times, kernels, world, precision)


def cluster_of(times: Times, kernels: int, world: int, precision: str) -> Cluster:
    """The cluster `local` with rates that follow from measured times.

    Args:
        kernels: of the small step; each costs a call, with its share of Python, autograd and views.
    """
    source = f"measured in this run, {world} ranks at once"

    def figure(value: float, note: str) -> Any:
        return Figure(value=value, source=source, note=note)

    local = load_cluster("local")
    device = local.device.model_copy(
        update={
            "peak_flops_per_s": {
                precision: figure(2 * SIDE**3 / times.product_s, f"products of [{SIDE}, {SIDE}] matrices")
            },
            "memory_bandwidth_bytes_per_s": figure(
                3 * SUMMED_BYTES / times.sum_s, f"sum of two tensors of {SUMMED_BYTES} bytes into new memory"
            ),
            "launch_overhead_s": figure(
                times.small_step_s / kernels, f"step of {SMALL.model} over its {kernels} operators"
            ),
        }
    )
    network = local.network
    if times.small_message_s is not None and times.large_message_s is not None:
        # what ring self-attention does; when noise puts the large message first, it has all the time
        moving_s = times.large_message_s - times.small_message_s
        bandwidth = MESSAGE_BYTES / (moving_s if moving_s > 0 else times.large_message_s)
        network = network.model_copy(
            update={
                "latency_s": figure(times.small_message_s, "each rank sends a byte to the next one"),
                "bandwidth_bytes_per_s": figure(bandwidth, f"likewise {MESSAGE_BYTES} bytes, less latency"),
            }
        )
    return local.model_copy(update={"about": f"this machine, {source}", "device": device, "network": network})
