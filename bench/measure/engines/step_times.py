"""The time of a step. For a simulated step: the parts of the time, its bound, and the class of its rates. For
a measured step: the timing of steps on a real device, without meters. For both: the model's FLOPs.

The FLOPs of a model are those on a single device, counted on fake tensors from the model's own code, for one
sequence and few layers, because FLOPs are linear in both. Recomputation in backward, work repeated on several
ranks, and padding for ranks are no FLOPs of the model. Scores that a causal mask, a window or packed
documents hide do not count. Linear attention and recurrences are counted in the single device's chunks.
"""

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from spbench.bench.cell import OWN_STEP, Cell, Timing
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
from spbench.bench.measurement import Measurement, bound_of
from spbench.bench.setting_values import StandIn, stand_ins
from spbench.impls import is_packaged, model_preset, nesting

#: FLOPs of a step over the FLOPs of its forward: backward has two matmuls for each matmul of forward
_OF_FORWARD = {"training": 3, "inference": 1}
#: model options that only cut matmuls into pieces; tracing would take longer, and FLOPs stay the same
_PIECES = ("mlp_tile", "loss_tile", "tiling")
#: the relative rounding error that a sum of many floating-point numbers can have
_ROUNDING = 1e-9


def model_flops(cell: Cell) -> float:
    """The FLOPs of the cell's model in a step (forward, and backward in training), for the whole batch."""
    return _OF_FORWARD[cell.training.step] * forward_flops(cell).forward


def forward_flops(cell: Cell) -> Flops:
    """The FLOPs of the cell's model in its forward pass, for the whole batch."""
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
    """(:attr:`Measurement.flops`, a line that says how the FLOPs of all ranks differ from the model's; "" if
    they agree).

    Ranks only share out causal softmax attention, so together they have the model's FLOPs, except for padded
    heads, the diagonals of striped placement, and traced ranks that represent ranks of slightly different
    work. The FLOPs of all matmuls are at least the model's. Linear attention and experts with a capacity are
    not checked. A user's strategy may have more FLOPs, for example for masked scores, or may call no
    attention kernel, so that its attention counts among the matmuls.

    Args:
        metered: the FLOPs of all ranks together.
    """
    model = forward_flops(cell)
    counts = {"model": model_flops(cell), "forward": metered.forward, "all": metered.all}
    sites = model_preset(*cell.model_arguments).sites(1, cell.shape[1])
    kinds = {site.kind for site in sites}
    if kinds & {"linear_attention", "gated_recurrence"}:
        return counts, ""  # ranks with fewer positions cut these into other chunks
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


def add_step_time(
    measurement: Measurement,
    cell: Cell,
    step_time_s: float,
    breakdown: Mapping[str, float] | None = None,
    priced_by: Mapping[Substitute, float] | None = None,
    stood_in: Sequence[StandIn] = (),
) -> None:
    """Set a measurement's step time, and its throughput in tokens/s and samples/s of the whole batch; for a
    simulated time also its breakdown and the class of its rates.

    Args:
        breakdown: seconds by part, for a simulated time; None: the time was measured.
        priced_by: for a simulated time, the seconds of work without a rate of its own, by its substitute.
        stood_in: stand-ins of a user's step, before those of the cell's program.
    """
    measurement.step_time_s = step_time_s
    if cell.strategy != OWN_STEP:
        measurement.tokens_per_s = model_preset(*cell.model_arguments).tokens(*cell.shape) / step_time_s
        measurement.samples_per_s = cell.shape[0] / step_time_s
    if breakdown is not None:
        cluster = load_cluster(cell.cluster)
        ranks = {**cell.sizes.by_axis, "nodes": -(-cell.sizes.world // cluster.devices_per_node)}
        model = None if cell.strategy == OWN_STEP else model_preset(*cell.model_arguments)
        ranks |= {"experts": getattr(model, "experts", 0), "graphs": 1 + (cell.training.cuda_graph != "none")}
        ranks["lora"] = 1 + bool(cell.model_options.get("lora_rank"))
        of_cell = stand_ins(cell.program, cell.training.backend, ranks, cluster.network.name)
        measurement.breakdown = dict(breakdown)
        measurement.calibration = cluster.calibration_of(cell.precision).label
        of_datasheet = cluster.rates_of(cell.precision) == "datasheet"  # which then prices all work
        by_others = [] if of_datasheet else by_share(priced_by or {}, step_time_s)
        measurement.priced_by = [*(each.price for each in (*stood_in, *of_cell)), *by_others]
        program = cell.model, cell.strategy
        measurement.rates = rates_of_step(cluster, cell.precision, program, measurement.priced_by)


def add_simulated_time(
    measurement: Measurement, cell: Cell, simulated: Timeline | StepNumbers, stood_in: Sequence[StandIn] = ()
) -> None:
    """Set a measurement's simulated step time with its parts, bound, MFU and FLOPs; status mismatch if the
    FLOPs of the ranks disagree with the model's. The FLOPs of the model of a user's step are three times
    those of forward if the step has a backward, as of a model that is trained whole."""
    step = StepNumbers.of(simulated).with_allocator(measurement.by_class, cell.training.steps)
    add_step_time(measurement, cell, step.step_time_s, step.breakdown, step.priced_by, stood_in)
    measurement.parts = dict(step.parts)
    measurement.bound = bound_of({**measurement.breakdown, **measurement.parts})
    if cell.strategy == OWN_STEP:
        forward, _, every = step.flops
        model = (3 if every > forward else 1) * forward
        measurement.flops = {"model": model, "forward": forward, "all": every}
        measurement.mfu = utilization(cell, step.step_time_s, model)
        return
    measurement.mfu = utilization(cell, step.step_time_s)
    measurement.flops, wrong = checked_flops(cell, step.flops)
    if wrong and measurement.status == "ok":
        measurement.status, measurement.reason = "mismatch", wrong


def utilization(cell: Cell, step_time_s: float, flops: float | None = None) -> float | None:
    """Model FLOPs utilization (MFU), 0 to 1: ``flops`` (None: :func:`model_flops`) over the FLOPs that all
    ranks could do in the step's time by their datasheet; None if the datasheet's peak is not known. For one
    model and length MFU is proportional to the throughput of a GPU, whatever the strategy."""
    peaks = load_cluster(cell.cluster).device.peak_flops_per_s
    peak = next((figure.value for name, figure in peaks.items() if name == cell.precision), None)
    if not peak or step_time_s <= 0:
        return None
    return (model_flops(cell) if flops is None else flops) / (step_time_s * peak * cell.sizes.world)


def can_time(cell: Cell) -> bool:
    """Whether the cell's cluster has the rates that a simulated time needs."""
    try:
        check_rates(load_cluster(cell.cluster), cell.precision, cell.sizes.world)
    except RatesUnknown:
        return False
    return True


#: keys of torch.cuda.memory_stats that show whether a step was short of memory or fragmented it
_STATISTICS = ("num_alloc_retries", "num_ooms", "inactive_split_bytes.all.peak")


def add_timed_steps(
    metered: Measurement, rank: int, step: Callable[[], Any], timing: Timing, device_type: str
) -> Measurement:
    """Warm up, time steps, and add to a metered measurement: the steps' seconds on the slowest rank, facts of
    host and device (:attr:`Measurement.ranks`) and, on a GPU, the peaks of torch's allocator in place of the
    meters' peaks. All ranks call this function together.

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
    """A line about the first rank whose clocks fell while steps were timed; "" if no clocks fell.

    Args:
        ranks: :attr:`Measurement.ranks`.
    """
    notes = {entry["rank"]: entry.get("telemetry", {}).get("clocks_note") for entry in ranks}
    return next((f"rank {rank}: {note}" for rank, note in notes.items() if note), "")


def seconds(work: Callable[[], Any], device_type: str, repeats: int, *, burst: int = 1) -> list[float]:
    """The seconds of one call of ``work`` on the slowest rank: ``repeats`` samples, each the mean of a burst.

    All ranks call this function together, start together, and get the same samples. On a GPU, a
    pair of CUDA events encloses each burst, and the host waits for the device once, at the end, so that
    kernels are launched ahead as in training; events see the current stream and the work it waits for. On
    CPUs, where a call has ended when it returns, ranks meet again before each burst.

    The function does not warm up: the first call may allocate, compile or connect.

    Args:
        work: a function that runs one step, or one operation.
        device_type: :attr:`DeviceMesh.device_type`, "cuda" or "cpu".
        repeats: the number of samples.
        burst: calls in a sample; several, if one call is short compared with the clock or a barrier.
    """
    time_bursts = _by_events if device_type == "cuda" else _by_clock
    samples = time_bursts(work, repeats, burst)
    taken = torch.tensor(samples, dtype=torch.float64, device=device_type) / burst
    if dist.is_initialized():
        dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.tolist()


def _by_events(work: Callable[[], Any], repeats: int, burst: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    _meet("cuda")
    for start, end in pairs:
        start.record()
        for _ in range(burst):
            work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]  # milliseconds to seconds


def _by_clock(work: Callable[[], Any], repeats: int, burst: int) -> list[float]:
    samples = []
    for _ in range(repeats):
        _meet("cpu")
        start = time.perf_counter()
        for _ in range(burst):
            work()
        samples.append(time.perf_counter() - start)
    return samples


def _meet(device_type: str) -> None:
    """Wait until all ranks call this function, and the device has done its work.

    An all-reduce replaces ``dist.barrier``, which needs the device with NCCL and refuses a device with Gloo.
    No rank has the sum before all ranks have given their part.
    """
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device_type))
    if device_type == "cuda":
        torch.cuda.synchronize()


def telemetry_of(device_index: int | None) -> Telemetry:
    """The telemetry of a CUDA device; an empty telemetry for None, or if torch has no such device.

    The index counts within CUDA_VISIBLE_DEVICES, in CUDA's order; the management library finds the same GPU
    by its UUID.
    """
    if device_index is None or device_index >= torch.cuda.device_count():
        return Telemetry(None)
    return Telemetry(str(torch.cuda.get_device_properties(device_index).uuid))
