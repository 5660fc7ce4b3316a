"""The time of a step in a measurement: model FLOPs, what bounds it, what its rates are.

What steps on a real device say beside their times.

The clock of real ranks: samples of the slowest rank, the same on all, in seconds of one call.
"""

import time

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes, Timing, TrainingOptions
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.engines import step_times
from spbench.bench.measure.engines.step_times import (
    add_timed_steps,
    bound_of,
    forward_flops,
    remark,
    seconds,
    utilization,
)
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measurement import Measurement
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


def test_recomputation_adds_nothing_to_the_flops_of_the_model() -> None:
    plain = VirtualEngine().measure(Cell(strategy="single", **TINY))
    again = VirtualEngine().measure(Cell(strategy="single", model_options={"checkpointing": True}, **TINY))
    assert again.step_time_s > plain.step_time_s
    assert again.mfu * again.step_time_s == pytest.approx(plain.mfu * plain.step_time_s)


def test_a_forward_pass_alone_has_a_third_of_the_flops() -> None:
    training = Cell(strategy="single", **TINY)
    inference = training.model_copy(update={"training": TrainingOptions(step="inference")})
    both = [utilization(cell, 1e-3) for cell in (training, inference)]
    flops = forward_flops(training).forward
    assert both[0] == pytest.approx(3 * flops / (1e-3 * 19.5e12))
    assert both[1] == pytest.approx(flops / (1e-3 * 19.5e12))


def test_without_a_peak_there_is_no_utilization() -> None:
    assert utilization(Cell(model="bert-tiny", strategy="single", batch=2, seq_len=32), 1.0) is None


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        ({"matmul_s": 3, "attention_s": 2, "memory_bound_s": 1}, "matmul"),
        ({"matmul_s": 1, "intra_node_s": 2, "inter_node_s": 3, "bubble_s": 2}, "inter-node links"),
        ({"matmul_s": 3, "overhead_s": 2, "host_s": 2}, "host"),
        ({"matmul_s": 3, "overhead_s": 2}, "matmul"),
        ({"compute_s": 9, "hidden_communication_s": 9, "bubble_s": 1}, "bubble"),
        ({}, ""),
    ],
)
def test_the_largest_part_bounds_the_step(seconds: dict[str, float], bound: str) -> None:
    assert bound_of(seconds) == bound


def with_figures(**figures: object) -> Cluster:
    made = cluster().model_dump()
    return Cluster.model_validate({**made, "device": {**made["device"], **figures}})


def test_rates_are_a_datasheets_unless_products_were_measured() -> None:
    share = {"value": 0.7, "source": "a benchmark"}
    assert with_figures().rates_of("fp32") == "datasheet"
    assert with_figures(memory_efficiency=share).rates_of("fp32") == "datasheet"
    assert with_figures(compute_efficiency=share).rates_of("fp32") == "sourced"
    matmuls = {"fp32": {"share": share}}
    assert with_figures(matmul=matmuls).rates_of("fp32") == "sourced"
    assert with_figures(matmul=matmuls).rates_of("bf16") == "datasheet"


def test_what_is_fitted_to_step_times_is_no_source() -> None:
    fitted = {"value": 0.7, "source": "a paper", "fitted_on": ["a cell"]}
    assert with_figures(compute_efficiency=fitted).rates_of("fp32") == "fitted"
    assert load_cluster("a100-lasp").rates_of("bf16") == "fitted"
