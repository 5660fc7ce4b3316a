"""The time of a step. A simulated one: its parts, its bounds, and the rates it rests on. A measured one:
steps of a real device, timed and not metered. For both: the FLOPs of the model on a single device.

They are counted on fake tensors, from the model's own code: of one sequence and of few layers, as FLOPs are
linear in both. What backward computes again, what several ranks compute alike, and what is padded for ranks
are no FLOPs of the model; of a causal mask, a window and packed documents only what they leave is counted.
Linear attention and recurrences are counted as the single device computes them, in chunks.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from spbench.bench.cell import Cell, Timing
from spbench.bench.measure.clusters.card_kernels import RatesUnknown, check_rates
from spbench.bench.measure.clusters.cluster import Precision, load_cluster
from spbench.bench.measure.devices.telemetry import Telemetry
from spbench.bench.measure.engines.cell_schedule import played_arguments
from spbench.bench.measure.engines.deepened_traces import with_layers
from spbench.bench.measure.engines.step_line import StepNumbers, by_share, rates_of_step
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.unlike_ranks import work_error
from spbench.bench.measure.simulator.program import Flops, flops_of
from spbench.bench.measure.simulator.substitutes import Substitute
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measurement import Measurement
from spbench.bench.setting_values import stand_ins
from spbench.impls import is_packaged, model_preset, nesting

#: FLOPs of a step over those of its forward: backward has two matmuls for each
_OF_FORWARD = {"training": 3, "inference": 1}
#: options of models that cut the same matmuls into pieces, which a single device would trace one by one
_PIECES = ("mlp_tile", "loss_tile", "tiling")
#: what sums of that many numbers can be off by
_ROUNDING = 1e-9


def model_flops(cell: Cell) -> float:
    """FLOPs of a step of the cell's model, for the whole batch."""
    return _OF_FORWARD[cell.training.step] * forward_flops(cell).forward


def forward_flops(cell: Cell) -> Flops:
    """FLOPs of the forward of the cell's model, for the whole batch."""
    batch, seq_len = cell.shape
    return _of_a_sequence(json.dumps(played_arguments(cell)), cell.precision, seq_len).times(batch)


@lru_cache(maxsize=256)
def _of_a_sequence(model: str, precision: Precision, seq_len: int) -> Flops:
    name, options, config = json.loads(model)
    options = {option: value for option, value in options.items() if option not in _PIECES}
    alone = {"strategy": "single", "batch": 1, "seq_len": seq_len, "training": {"step": "inference"}}
    of_model = {"model": name, "model_options": options, "model_config_json": config}
    cell = Cell.model_validate({**alone, **of_model, "precision": precision})
    built = model_preset(*cell.model_arguments)
    layers = getattr(built, "layers", 0)
    if layers <= 2 * built.period or layers % built.period:
        return _forward(cell)
    one, two = (_forward(with_layers(cell, n * built.period)) for n in (1, 2))
    return one.plus(two.plus(one.times(-1)).times(layers // built.period - 1))


def _forward(cell: Cell) -> Flops:
    program = trace(cell, events=True).program
    assert program is not None
    return flops_of(program)


def checked_flops(cell: Cell, metered: Flops) -> tuple[dict[str, float], str]:
    """:attr:`Measurement.flops`, and in words where the work of the ranks together is not that of the model;
    "" where it is.

    Causal softmax attention is work that ranks only share out: together they have the model's, but for heads
    that are padded, the diagonals of stripes, and sets of ranks of which one stands for others of much the
    same work. All matmuls together are at least the model's. This is not said of linear attention, or where
    experts have a capacity. A strategy of users may have more, as one that multiplies what a mask hides, or
    calls no kernel of attention: then its attention is among all matmuls.

    Args:
        metered: of all ranks.
    """
    model = forward_flops(cell)
    counts = {"model": model_flops(cell), "forward": metered.forward, "all": metered.all}
    sites = model_preset(*cell.model_arguments).sites(1, cell.shape[1])
    kinds = {site.kind for site in sites}
    if kinds & {"linear_attention", "gated_recurrence"}:
        return counts, ""  # cut into other chunks where ranks have fewer positions
    allowed = _ROUNDING + (work_error(cell) or 0.0)
    if cell.strategy_options.get("placement") == "striped":
        allowed += cell.sizes.world / cell.shape[1]
    of_users = not all(is_packaged(cls) for cls in nesting(cell.strategy).classes)
    more = "causal_attention" not in kinds or cell.strategy_options.get("pad_heads") or of_users
    most = float("inf") if more else model.attention * (1 + allowed)
    least = 0.0 if of_users and not metered.attention else model.attention * (1 - allowed)
    if not least <= metered.attention <= most:
        return counts, _differs("softmax attention", metered.attention, model.attention)
    capped = any(site.experts is not None and site.experts.capacity is not None for site in sites)
    if not capped and metered.forward < model.forward * (1 - allowed):
        return counts, _differs("forward", metered.forward, model.forward)
    return counts, ""


def _differs(what: str, metered: float, model: float) -> str:
    return (
        f"the ranks together have {metered:.6g} FLOPs of {what}, and the model has {model:.6g}: "
        "a rank stands for others that have other work"
    )


#: what can bound a step, by the names of :attr:`Measurement.parts` and :attr:`Measurement.breakdown`
BOUNDS = {
    "matmul": ("matmul_s",),
    "attention": ("attention_s",),
    "memory": ("memory_bound_s",),
    "intra-node links": ("intra_node_s",),
    "inter-node links": ("inter_node_s",),
    "bubble": ("bubble_s",),
    "host": ("overhead_s", "host_s"),
}


def add_step_time(
    measurement: Measurement,
    cell: Cell,
    step_time_s: float,
    breakdown: Mapping[str, float] | None = None,
    priced_by: Mapping[Substitute, float] = MappingProxyType({}),
) -> None:
    """Set the step time, and throughput in tokens of the model and in samples of the whole batch; of a
    simulated time also what it is made of, and what its cluster's rates are.

    Args:
        priced_by: of a simulated time, seconds of what is priced by something else than a rate of its own.
    """
    measurement.step_time_s = step_time_s
    measurement.tokens_per_s = model_preset(*cell.model_arguments).tokens(*cell.shape) / step_time_s
    measurement.samples_per_s = cell.shape[0] / step_time_s
    if breakdown is not None:
        cluster = load_cluster(cell.cluster)
        measurement.breakdown = dict(breakdown)
        measurement.calibration = cluster.calibration_of(cell.precision).label
        if cluster.rates_of(cell.precision) != "datasheet":  # of which all is priced by the datasheet
            measurement.priced_by = by_share(priced_by, step_time_s)
        nodes = -(-cell.sizes.world // cluster.devices_per_node)
        ranks = {**cell.sizes.by_axis, "nodes": nodes}
        network = cluster.network.bandwidth_bytes_per_s.substitute
        stood_in = stand_ins(cell.program, cell.training.backend, ranks, network)
        measurement.priced_by = [*(each.price for each in stood_in), *measurement.priced_by]
        program = cell.model, cell.strategy
        measurement.rates = rates_of_step(cluster, cell.precision, program, measurement.priced_by)


def add_simulated_time(measurement: Measurement, cell: Cell, timeline: Timeline | StepNumbers) -> None:
    """Set the step time of a simulation, what it is made of, and what bounds it."""
    add_step_time(measurement, cell, timeline.step_time_s, timeline.breakdown, timeline.priced_by)
    measurement.parts = dict(timeline.parts)
    measurement.bound = bound_of({**measurement.breakdown, **measurement.parts})
    measurement.mfu = utilization(cell, timeline.step_time_s)
    measurement.flops, wrong = checked_flops(cell, timeline.flops)
    if wrong and measurement.status == "ok":
        measurement.status, measurement.reason = "mismatch", wrong


def bound_of(seconds: Mapping[str, float]) -> str:
    """The one of :data:`BOUNDS` that takes most of a step, of several the first; "" of a step of no time.

    Args:
        seconds: of the parts of a step; one that is absent takes none.
    """
    taken = {name: sum(seconds.get(part, 0.0) for part in of) for name, of in BOUNDS.items()}
    most = max(taken, key=taken.__getitem__)
    return most if taken[most] > 0 else ""


def utilization(cell: Cell, step_time_s: float) -> float | None:
    """The FLOPs of a step's model (:func:`model_flops`) over what the ranks' datasheet promises in the time,
    from 0 to 1; None where the datasheet's figure is not known. So for one model and length it goes as the
    throughput of a GPU, whatever the strategy."""
    peaks = load_cluster(cell.cluster).device.peak_flops_per_s
    peak = next((figure.value for name, figure in peaks.items() if name == cell.precision), None)
    if not peak or step_time_s <= 0:
        return None
    return model_flops(cell) / (step_time_s * peak * cell.sizes.world)


def can_time(cell: Cell) -> bool:
    """Whether the cell's cluster has the figures that a time needs."""
    try:
        check_rates(load_cluster(cell.cluster), cell.precision, cell.sizes.world)
    except RatesUnknown:
        return False
    return True


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
    entry: dict[str, Any] = {"rank": rank, "host": platform.node()}
    entry["device"] = torch.cuda.get_device_name() if on_gpu else device_type
    for _ in range(timing.warmup):
        step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        entry["allocated_before_bytes"] = torch.cuda.memory_allocated()
    with telemetry_of(torch.cuda.current_device() if on_gpu else None) as telemetry:
        metered.step_time_samples_s = seconds(step, device_type, timing.samples)
    if on_gpu:
        torch.cuda.synchronize()
        statistics = torch.cuda.memory_stats()
        entry["metered_peak_memory_bytes"] = metered.peak_memory_bytes
        metered.by_class = []
        metered.peak_memory_bytes = entry["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        metered.reserved_memory_bytes = entry["reserved_memory_bytes"] = torch.cuda.max_memory_reserved()
        entry |= {name: statistics.get(name, 0) for name in _STATISTICS}
        entry["telemetry"] = telemetry.summary(timing.samples)
    metered.ranks = [entry]
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


def telemetry_of(device_index: int | None) -> Telemetry:
    """Telemetry of a CUDA device of this process; of nothing for None, or where torch has no such device.

    The index is one among CUDA_VISIBLE_DEVICES, in CUDA's order; the management library knows the same GPU by
    its UUID.
    """
    if device_index is None or device_index >= torch.cuda.device_count():
        return Telemetry(None)
    return Telemetry(str(torch.cuda.get_device_properties(device_index).uuid))
