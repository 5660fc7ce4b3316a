"""Steps on a real device that are timed and not metered: what a training engineer would see of them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from spbench.bench.cell import Timing
from spbench.bench.measurement import Measurement
from spbench.bench.meters.telemetry import telemetry_of

#: of torch.cuda.memory_stats, what says that a step was short of memory or fragmented it
_STATISTICS = ("num_alloc_retries", "num_ooms", "inactive_split_bytes.all.peak")


@dataclass(frozen=True)
class TimedSteps:
    """What the steps have taken.

    Attributes:
        samples_s: seconds of each step on the slowest rank; the same on all ranks.
        device: of this rank: ``host``, ``device``, and on a GPU the bytes of torch's caching allocator:
            allocated before the steps, at the peak allocated and reserved, and what of
            torch.cuda.memory_stats says that memory was short; under ``telemetry``,
            :meth:`Telemetry.found`.
    """

    samples_s: list[float]
    device: dict[str, Any] = field(default_factory=dict)


def timed_steps(step: Callable[[], Any], timing: Timing, device_type: str) -> TimedSteps:
    """Warm up, then time steps; all ranks call this together.

    Raises:
        torch.OutOfMemoryError: a GPU has no room for the step.
    """
    for _ in range(timing.warmup):
        step()
    before = allocator_before() if device_type == "cuda" else {}
    with telemetry_of(torch.cuda.current_device() if device_type == "cuda" else None) as telemetry:
        samples = seconds(step, device_type, timing.samples)
    found = {"host": platform.node(), "device": device_name(device_type)}
    if device_type == "cuda":
        found |= before | allocator_peaks() | {"telemetry": telemetry.found(timing.samples)}
    return TimedSteps(samples, found)


def remark(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A line on the first rank whose clocks fell while steps were timed; "" if none did.

    Args:
        ranks: ``rank`` and :attr:`TimedSteps.device` of each.
    """
    notes = {entry["rank"]: entry.get("telemetry", {}).get("clocks_note") for entry in ranks}
    return next((f"rank {rank}: {note}" for rank, note in notes.items() if note), "")


def with_device_peaks(metered: Measurement, rank: int, steps: TimedSteps) -> Measurement:
    """What the meters saw of a step, with the times of further ones, and with the peaks of the device's own
    allocator in the place of the meters' where it has one."""
    metered.step_time_samples_s = steps.samples_s
    metered.ranks = [{"rank": rank, **steps.device}]
    if "peak_memory_bytes" in steps.device:
        metered.ranks[0]["metered_peak_memory_bytes"] = metered.peak_memory_bytes
        metered.by_class = []
        metered.peak_memory_bytes = steps.device["peak_memory_bytes"]
        metered.reserved_memory_bytes = steps.device["reserved_memory_bytes"]
    return metered


def device_name(device_type: str) -> str:
    """Of the device that this process uses, as its driver calls it; "cpu" of a CPU."""
    return torch.cuda.get_device_name() if device_type == "cuda" else device_type


def allocator_before() -> dict[str, Any]:
    """Bytes that torch's caching allocator has given to tensors on this GPU; peaks count from now."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return {"allocated_before_bytes": torch.cuda.memory_allocated()}


def allocator_peaks() -> dict[str, Any]:
    """Peaks of torch's caching allocator on this GPU since :func:`allocator_before`."""
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    return {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "reserved_memory_bytes": torch.cuda.max_memory_reserved(),
        **{name: statistics.get(name, 0) for name in _STATISTICS},
    }


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
