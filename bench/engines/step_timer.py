"""The clock of every engine that runs real kernels: CUDA events on GPUs, the system's clock on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def seconds(
    work: Callable[[], Any],
    device_type: str,
    repeats: int,
    *,
    burst: int = 1,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """Seconds of one call of ``work``, on the slowest rank: a sample of each of ``repeats`` bursts of calls.

    All ranks of the group call this together, and all get the same samples. None begins before all are
    there. On a GPU a pair of CUDA events stands around each burst, and the host waits for the device once, at
    the end, so that kernels are launched ahead as in training; events see the current stream and what that
    waits for. On CPUs, where a call has ended when it returns, ranks meet again before each burst.

    Nothing here warms up: the first call may allocate, compile or connect.

    Args:
        work: one step, or one operation.
        device_type: "cuda" or "cpu", as :attr:`DeviceMesh.device_type` says it.
        repeats: samples.
        burst: calls of which a sample is the mean, for work that is short beside the clock or a barrier.
        group: the ranks that take part; None: all, or this process alone where there is no process group.
    """
    time_bursts = _by_events if device_type == "cuda" else _by_clock
    samples = time_bursts(work, repeats, burst, group)
    taken = torch.tensor(samples, dtype=torch.float64, device=device_type) / burst
    if dist.is_initialized():
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return taken.tolist()


def _by_events(
    work: Callable[[], Any], repeats: int, burst: int, group: dist.ProcessGroup | None
) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    _meet("cuda", group)
    for start, end in pairs:
        start.record()
        for _ in range(burst):
            work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]  # of milliseconds


def _by_clock(
    work: Callable[[], Any], repeats: int, burst: int, group: dist.ProcessGroup | None
) -> list[float]:
    samples = []
    for _ in range(repeats):
        _meet("cpu", group)
        start = time.perf_counter()
        for _ in range(burst):
            work()
        samples.append(time.perf_counter() - start)
    return samples


def _meet(device_type: str, group: dist.ProcessGroup | None) -> None:
    """Wait until all ranks are here, and the device has done what it was given.

    A sum, since ``dist.barrier`` has to be told the device by NCCL and refuses it by Gloo; no rank has the
    sum before all have given their part.
    """
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device_type), group=group)
    if device_type == "cuda":
        torch.cuda.synchronize()
