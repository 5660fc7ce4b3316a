"""Steps on a real device that are timed and not metered: what a training engineer would see of them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spbench.bench.cell import Timing
from spbench.bench.measure.devices.telemetry import telemetry_of
from spbench.bench.measurement import Measurement

#: of torch.cuda.memory_stats, what says that a step was short of memory or fragmented it
_STATISTICS = ("num_alloc_retries", "num_ooms", "inactive_split_bytes.all.peak")


def add_timed_steps(
    metered: Measurement, rank: int, step: Callable[[], Any], timing: Timing, device_type: str
) -> Measurement:
    """Warm up, then time steps, and add to what the meters saw of a step: their seconds on the slowest rank,
    what host and device say (:attr:`Measurement.ranks`), and the peaks of the device's own allocator in the
    place of the meters' where it has one. All ranks call this together.

    Raises:
        torch.OutOfMemoryError: a GPU has no room for the step.
    """
    on_gpu = device_type == "cuda"
    found: dict[str, Any] = {"rank": rank, "host": platform.node()}
    found["device"] = torch.cuda.get_device_name() if on_gpu else device_type
    for _ in range(timing.warmup):
        step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found["allocated_before_bytes"] = torch.cuda.memory_allocated()
    with telemetry_of(torch.cuda.current_device() if on_gpu else None) as telemetry:
        metered.step_time_samples_s = seconds(step, device_type, timing.samples)
    if on_gpu:
        torch.cuda.synchronize()
        statistics = torch.cuda.memory_stats()
        found["metered_peak_memory_bytes"] = metered.peak_memory_bytes
        metered.by_class = []
        metered.peak_memory_bytes = found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        metered.reserved_memory_bytes = found["reserved_memory_bytes"] = torch.cuda.max_memory_reserved()
        found |= {name: statistics.get(name, 0) for name in _STATISTICS}
        found["telemetry"] = telemetry.summary(timing.samples)
    metered.ranks = [found]
    return metered


def remark(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A line on the first rank whose clocks fell while steps were timed; "" if none did.

    Args:
        ranks: as :attr:`Measurement.ranks`.
    """
    notes = {entry["rank"]: entry.get("telemetry", {}).get("clocks_note") for entry in ranks}
    return next((f"rank {rank}: {note}" for rank, note in notes.items() if note), "")


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
