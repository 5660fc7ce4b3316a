"""The time of a step in a measurement: model FLOPs, what bounds it, what its rates are.

What steps on a real device say beside their times.

The clock of real ranks: samples of the slowest rank, the same on all, in seconds of one call.
The distributed engine on this machine's CPUs; and the order of the mesh: the same bytes and memory on
other ranks, and so other times between nodes."""

import os
import re
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes, Timing, TrainingOptions
from spbench.bench.measure.clusters.cluster import Cluster, Precision, load_cluster
from spbench.bench.measure.engines import class_traces, distributed, step_times, virtual
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.engines.plan import plan, rank_classes
from spbench.bench.measure.engines.rank_memory import RankMemory, allocator_of
from spbench.bench.measure.engines.setup import record_step
from spbench.bench.measure.engines.step_times import (
    add_timed_steps,
    forward_flops,
    remark,
    seconds,
    utilization,
)
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measurement import Measurement, bound_of
from spbench.impls.strategies.base import Unsupported
from spbench.impls.training.step import initialize
from tests.cells import make_cell
from tests.grid import tabled
from tests.measure.simulator.step_programs import cluster


def test_steps_on_a_cpu() -> None:
    calls: list[None] = []
    metered, timing = Measurement(peak_memory_bytes=7), Timing(warmup=2, samples=3)
    timed = add_timed_steps(metered, 1, lambda: calls.append(None), timing, "cpu")
    assert len(calls) == 5
    assert len(timed.step_time_samples_s) == 3
    assert (timed.ranks[0]["rank"], timed.ranks[0]["device"], timed.peak_memory_bytes) == (1, "cpu", 7)
    assert "telemetry" not in timed.ranks[0]


def test_a_row_says_on_which_rank_clocks_fell() -> None:
    quiet = {"rank": 0, "telemetry": {"clocks_note": None}}
    hot = {"rank": 5, "telemetry": {"clocks_note": "clocks fell to 1200 MHz (thermal)"}}
    assert remark([quiet, {"rank": 1}]) == ""
    assert remark([quiet, hot]) == "rank 5: clocks fell to 1200 MHz (thermal)"


#: the second far beyond what a busy machine delays a barrier by
_LONG_S, _LATE_S = 0.04, 2.0


def uneven_steps(mesh: DeviceMesh) -> tuple[list[float], list[float]]:
    """Steps of which rank 1's are long, and steps that only communicate, to which rank 1 comes late."""
    rank = dist.get_rank()
    uneven = seconds(lambda: time.sleep(_LONG_S * rank), mesh.device_type, repeats=3)
    time.sleep(_LATE_S * rank)
    return uneven, seconds(dist.barrier, mesh.device_type, repeats=3)


def test_a_step_is_as_long_as_on_the_slowest_rank(pool: RankPool) -> None:
    (first, after_waiting), *others = pool.run({"dp": 2}, uneven_steps)
    assert others == [(first, after_waiting)]
    assert len(first) == 3
    assert min(first) >= _LONG_S
    assert max(after_waiting) < _LATE_S / 2  # none begins before all are there


@pytest.mark.parametrize("burst", [1, 4])
def test_a_sample_is_one_call(burst: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that calls alone move, as a busy machine has other times."""
    calls: list[float] = []
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: sum(calls))
    samples = seconds(lambda: calls.append(_LONG_S), "cpu", repeats=2, burst=burst)
    assert len(calls) == 2 * burst
    assert samples == pytest.approx([_LONG_S] * 2)  # not the burst's


#: of one layer, forward: matmuls of 2 x 32 tokens, H 128
TINY = {"model": "bert-tiny", "batch": 2, "seq_len": 32, "cluster": "a100-nodes"}


def test_parts_make_up_what_they_are_of() -> None:
    sizes = Sizes(sp=8, dp=2)
    found = VirtualEngine().measure(Cell(strategy="ring_self_attention", sizes=sizes, **TINY))
    computing = sum(found.parts[f"{name}_s"] for name in ("matmul", "attention", "memory_bound"))
    assert computing == pytest.approx(found.breakdown["compute_s"])
    links = found.parts["intra_node_s"] + found.parts["inter_node_s"]
    assert links == pytest.approx(found.breakdown["exposed_communication_s"])
    assert found.parts["inter_node_s"] > 0
    assert found.bound == bound_of({**found.breakdown, **found.parts})
    # most of so small a step is launching it, and of this cluster's host nothing was measured
    assert found.rates == "transferred"
    assert [found.priced_by[0][name] for name in ("work", "by")] == ["host", "an H100's host"]


def test_the_time_of_adapters_is_of_a_class_of_its_own() -> None:
    case = Cell(
        strategy="single", model_options={"lora_rank": 4, "layers": 1}, **TINY | {"model": "llama3-8b"}
    )
    assert VirtualEngine().measure(case).rates == "adapters, measured slower"


def test_memory_that_is_asked_for_again_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card just so small that the allocator gives memory back in the step, a step is longer by the
    driver's calls."""
    training = TrainingOptions(backend="ddp")
    wide = {"hidden": 768, "inner": 3072, "vocabulary": 8192}
    on_any = make_cell("causal-transformer-tiny", "single", {"dp": 2}, 8, 512, model_options=wide)
    case = on_any.model_copy(update={"training": training, "cluster": "a100-sxm-80gb"})
    traces = virtual.trace_classes(case, events=True)
    free, log = traces.measurement(), traces.traces[0].memory
    sizes = range(free.reserved_memory_bytes, free.peak_memory_bytes, -2 * 2**20)
    capacity = next(n for n in sizes if RankMemory.of(log, n, allocator_of(case)).returned[-1][0])
    monkeypatch.setattr(class_traces, "usable_memory_bytes", lambda *_: capacity)
    full = replace(traces).measurement()
    seconds = full.by_class[-1]["returned_s"]
    assert full.status == "ok"
    assert "allocator_s" not in free.breakdown
    assert full.breakdown["allocator_s"] == seconds > full.by_class[-1]["returned_bytes"] * 1e-12
    assert full.step_time_s == pytest.approx(free.step_time_s + seconds)
    assert full.breakdown["host_s"] == free.breakdown["host_s"]
    assert full.mfu == pytest.approx(free.mfu * free.step_time_s / full.step_time_s)
    (calls,) = (each for each in full.priced_by if each["work"] == "the allocator's calls")
    assert calls["share"] == pytest.approx(seconds / full.step_time_s)


def test_recomputation_adds_nothing_to_the_flops_of_the_model() -> None:
    plain = VirtualEngine().measure(Cell(strategy="single", **TINY))
    again = VirtualEngine().measure(Cell(strategy="single", model_options={"checkpointing": True}, **TINY))
    assert again.step_time_s > plain.step_time_s
    assert again.mfu * again.step_time_s == pytest.approx(plain.mfu * plain.step_time_s)


@tabled(__file__, "windows_and_documents_count_in_the_flops_of_the_model")
def test_windows_and_documents_count_in_the_flops_of_the_model(options: dict[str, Any], pairs: int) -> None:
    full = make_cell("causal-transformer-tiny", "single", {}, 1, 64, cluster="dgx-h100")
    part = full.model_copy(update={"model_options": options})
    assert forward_flops(part).attention * 64 * 65 / 2 == forward_flops(full).attention * pairs
    assert (utilization(part, 1.0) or 0.0) < (utilization(full, 1.0) or 0.0)


def test_a_forward_pass_alone_has_a_third_of_the_flops() -> None:
    training = Cell(strategy="single", **TINY)
    inference = training.model_copy(update={"training": TrainingOptions(step="inference")})
    both = [utilization(cell, 1e-3) for cell in (training, inference)]
    flops = forward_flops(training).forward
    assert both[0] == pytest.approx(3 * flops / (1e-3 * 19.5e12))
    assert both[1] == pytest.approx(flops / (1e-3 * 19.5e12))


def test_without_a_peak_there_is_no_utilization() -> None:
    assert utilization(Cell(model="bert-tiny", strategy="single", batch=2, seq_len=32), 1.0) is None


@tabled(__file__, "the_largest_part_bounds_the_step")
def test_the_largest_part_bounds_the_step(seconds: dict[str, float], bound: str) -> None:
    assert bound_of(seconds) == bound


def with_figures(**figures: object) -> Cluster:
    made = cluster().model_dump()
    return Cluster.model_validate({**made, "device": {**made["device"], **figures}})


@tabled(__file__, "rates_are_a_datasheets_unless_products_were_measured")
def test_rates_are_a_datasheets_unless_products_were_measured(
    figures: dict[str, Any], precision: Precision, rates: str
) -> None:
    assert with_figures(**figures).rates_of(precision) == rates


def test_what_is_fitted_to_step_times_is_no_source() -> None:
    assert load_cluster("a100-lasp").rates_of("bf16") == "fitted"


SHAPE = "bert-tiny", "ring_self_attention", {"sp": 2}, 3, 24, "fp32"
CELL = make_cell(*SHAPE, engine="distributed", timing=Timing(warmup=1, samples=4))


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


#: replicas across two nodes of eight, sequences inside; and the reverse
ORDERS = REPLICAS_OUTSIDE, SEQUENCES_OUTSIDE = ["dp", "sp"], ["sp", "dp"]
#: attention outweighs the sum of gradients, so that sequences inside a node are the better order
WORK = {"layers": 2, "hidden": 256, "heads": 16, "inner": 256}


def cell(mesh: list[str], strategy: str = "ring_attention", **changes: Any) -> Cell:
    model, options = ("tnl-tiny", {}) if strategy == "lasp" else ("causal-transformer-tiny", WORK)
    fields = {"mesh": mesh, "cluster": "dgx-a100-datasheet", "model_options": options, **changes}
    return make_cell(model, strategy, {"dp": 2, "sp": 8}, 4, 8192, **fields)


def test_an_axis_across_nodes_takes_longer_and_sends_and_holds_the_same() -> None:
    inside, outside = (VirtualEngine().measure(cell(mesh)) for mesh in ORDERS)
    assert inside.status == outside.status == "ok"
    assert outside.step_time_s > 1.2 * inside.step_time_s
    # a mean over ranks, which are summed in another order
    assert inside.breakdown["compute_s"] == pytest.approx(outside.breakdown["compute_s"], rel=1e-12)
    for field in ("communication", "formula", "peak_memory_bytes", "reserved_memory_bytes", "peak_held"):
        assert getattr(inside, field) == getattr(outside, field), field


def test_on_one_node_the_order_makes_no_difference() -> None:
    """All links are alike there, so that it is the nodes that make one."""
    on_one = {"sizes": {"dp": 2, "sp": 4}}
    first, second = (VirtualEngine().measure(cell(mesh, **on_one)) for mesh in ORDERS)
    assert first.step_time_s == pytest.approx(second.step_time_s, rel=1e-12)


@pytest.mark.parametrize(
    ("mesh", "replicas", "chunks"),
    [(REPLICAS_OUTSIDE, [3, 11], [*range(8)]), (SEQUENCES_OUTSIDE, [6, 7], [*range(1, 16, 2)])],
    ids=["dp outside", "sp outside"],
)
def test_collectives_are_simulated_among_the_ranks_of_their_groups(
    mesh: list[str], replicas: list[int], chunks: list[int]
) -> None:
    """The two replicas of sequence rank 3, and all sequence ranks of the replica of the last rank."""
    traces = virtual.trace_classes(cell(mesh, "ulysses", seq_len=128), events=True)
    timeline = traces.simulator()()

    def groups(rank: int) -> set[tuple[int, ...]]:
        parties = (event.details.get("ranks") for event in timeline.events(rank))
        return {tuple(ranks) for ranks in parties if ranks}

    assert tuple(replicas) in groups(replicas[0])
    assert tuple(chunks) in groups(chunks[-1])


def test_ranks_of_a_class_are_those_of_the_order() -> None:
    """The last of LASP's ranks sends no state; each class has both replicas."""
    by_order = [[each.ranks for each in rank_classes(cell(mesh, "lasp"))] for mesh in ORDERS]
    assert by_order[0][-1] == (7, 15)
    assert by_order[1][-1] == (14, 15)
    for classes in by_order:
        assert sorted(rank for ranks in classes for rank in ranks) == [*range(16)]


@pytest.mark.slow
def test_real_ranks_meter_the_same_in_both_orders(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """LASP's last ranks send no state; were they others than planned, bytes would differ from the closed
    form."""
    small = {
        "engine": "distributed",
        "sizes": {"dp": 2, "sp": 2},
        "seq_len": 24,
        "precision": "fp32",
        "cluster": "local",
        "timing": Timing(warmup=0, samples=1),
        "model_options": {},
    }
    launch = "spbench.bench.measure.engines.distributed.launch"  # the ranks of the pool in place of new ones
    monkeypatch.setattr(launch, lambda cell, work: dict(enumerate(pool.run(cell.mesh_sizes, work, cell))))
    one, other = (DistributedEngine().measure(cell(mesh, "lasp", **small)) for mesh in ORDERS)
    expected = VirtualEngine().measure(cell(SEQUENCES_OUTSIDE, "lasp", **small))
    assert one.status == other.status == "ok"
    assert one.communication == other.communication == expected.communication
    assert one.formula == other.formula
    assert one.formula_difference == other.formula_difference == []
