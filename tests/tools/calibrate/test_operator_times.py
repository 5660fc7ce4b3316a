"""Operators inside training steps: the clock around them, on made-up seconds, and what follows from it.
Made-up measurements of machines."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.simulator.program import Category
from spbench.bench.tools.calibrate import operator_times as clocked
from spbench.bench.tools.calibrate.collective_rates import SEND, bus_factor
from spbench.bench.tools.calibrate.compute_rates import SMALL, RatePoint
from spbench.bench.tools.calibrate.machine_report import cluster_yaml
from spbench.bench.tools.calibrate.measured_cluster import Machine, cluster_of
from spbench.bench.tools.calibrate.operator_times import (
    BACKWARD,
    BARE,
    LADDER,
    MATMUL_IN_STEP,
    MODULE,
    OPERATOR,
    STEP,
    VIEW,
    WITH_NODE,
    host_figures,
    matmul_fit,
    operator_times,
    points_of,
)

_GELU = ("gelu", Category.MEMORY_BOUND, 800, 0, 2, (0, 0, 0, 0), (400,))
_MM = ("mm", Category.MATMUL, 300, 2_000, 2, (1, 10, 10, 10), (100,))
_SCALAR = ("mul", Category.MEMORY_BOUND, 0, 0, 2, (0, 0, 0, 0), (0,))


def operator(name: str, nbytes: int, seconds: float) -> RatePoint:
    return RatePoint(OPERATOR + name, f"{nbytes} B", nbytes, "fp32", 2, [seconds], nbytes=nbytes)


def product(flops: float, nbytes: int, seconds: float) -> RatePoint:
    return RatePoint(MATMUL_IN_STEP, "mm", nbytes, "fp32", 2, [seconds], flops=int(flops), nbytes=nbytes)


def test_each_call_is_timed_under_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(clocked, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    x = torch.ones(4, 4)
    with clocked._Clock() as clock:
        x.add_(1)
        x.t() @ x  # a view, which is free, and a product
        torch.relu(x)
        torch.relu(x)
    found = {(kind[0], kind[2], kind[3], kind[-1]): taken for kind, taken in clock.taken.items()}
    assert found == {
        ("add_", 128, 0, ()): [1.0],  # in place: nothing new, which would have to be freed
        ("mm", 192, 128, (64,)): [1.0],
        ("relu", 128, 0, (64,)): [1.0, 1.0],
    }


def test_a_step_is_its_operators_their_results_freeing_and_the_rest() -> None:
    freeing = [(100.0, 0.0), (400.0, 3.0)]
    calls = {_GELU: 2, _MM: 1, _SCALAR: 1}
    samples = {_GELU: [1.0, 2.0], _MM: [5.0, 5.0], _SCALAR: [0.5, 0.5]}
    rest, gelu, mm = points_of(SMALL, [20.0, 16.0], calls, samples, freeing)
    assert (rest.operation, rest.extent) == (STEP, 4)
    # 2 x (1 + 3) + 5 + 0.5 inside, then 2 x (2 + 3) + 5 + 0.5
    assert rest.samples_s == [6.5, 0.5]
    assert (gelu.operation, gelu.nbytes, gelu.samples_s) == (OPERATOR + "gelu", 800, [4.0, 5.0])
    assert (mm.operation, mm.flops, mm.samples_s) == (MATMUL_IN_STEP, 2_000, [5.0, 5.0])


def test_a_busy_moment_is_no_negative_time() -> None:
    (rest, *_) = points_of(SMALL, [1.0], {_MM: 1}, {_MM: [5.0]}, [(1.0, 0.0)])
    assert rest.samples_s == [0.0]


def test_calls_of_similar_sizes_are_one_point() -> None:
    points = [
        operator("gelu", n, s) for n, s in ((8, 1.0), (4000, 3.0), (9000, 4.0), (15000, 6.0), (2**20, 9.0))
    ]
    assert operator_times([*points, operator("add", 9000, 1.0)]) == {
        "add": [[9000, 1.0]],
        "gelu": [[2004, 2.0], [12000, 5.0], [2**20, 9.0]],
    }


def test_products_have_a_rate_and_a_bandwidth() -> None:
    sizes = [(1e8, 10**6), (1e9, 4 * 10**6), (4e8, 9 * 10**6)]
    points = [product(flops, n, flops / 2e9 + n / 5e8) for flops, n in sizes]
    small = product(1e3, 100, 1.0)  # nothing but a call
    fit = matmul_fit([*points, small], "fp32")
    assert fit is not None
    assert [1 / c for c in fit.coefficients] == pytest.approx([2e9, 5e8])
    assert matmul_fit(points, "bf16") is None


#: operators, views, nodes and modules of three steps
_COUNTS = [[100, 50, 40, 10], [200, 50, 40, 10], [900, 700, 500, 100]]


def host_points(*steps_s: float) -> list[RatePoint]:
    """Calls of each kind alone, and what steps take beside their operators."""
    alone = {WITH_NODE: (1, 5.0), BARE: (1, 3.0), VIEW: (1, 1.0), BACKWARD: (50, 350.0), MODULE: (1, 6.0)}
    calls = [RatePoint(name, "", n, "fp32", 2, [s]) for name, (n, s) in alone.items()]
    return [*calls, *(RatePoint(STEP, "", 1, "fp32", 2, [s]) for s in steps_s)]


def test_the_hosts_figures_are_of_calls_alone_and_a_step_is_what_is_left() -> None:
    # operator 5 - 3, node 350 / 50 - 3: the first step has 200 + 50 + 160 + 60 without itself
    points = [*host_points(480.0, 670.0 + 30.0, 0.0), operator("gelu", 8, 1.0)]
    assert host_figures(points, _COUNTS) == {
        "operator_s": 2.0,
        "view_s": 1.0,
        "node_s": 4.0,
        "module_s": 6.0,
        "step_s": 10.0,  # the median of 10, 30 and a step that noise made too short
    }
    assert host_figures(host_points(0.0, 0.0, 0.0), _COUNTS)["step_s"] == 0.0


@pytest.mark.parametrize("speed", [200, 500], ids=["slower", "faster than the best matmul"])
def test_the_file_has_the_figures(speed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*ANY_FIGURE)
    plain = machine()
    points = [
        *plain.points,
        *(product(f, n, f / speed + n / 1e6) for f, n in ((1e7, 10**6), (4e7, 10**6), (1e8, 5 * 10**6))),
        operator("gelu", 4096, 0.001),
        operator("gelu", 65536, 0.1234567),
        *host_points(480.0, 690.0, 0.0),
    ]
    found = cluster_of(replace(plain, points=points, host_work=_COUNTS), "here", "a source")
    device = found.device
    assert device.launch_overhead_s.value is None
    assert found.host is not None
    assert found.host.synchronous
    assert (found.host.operator_s.value, found.host.step_s.value) == (2.0, 10.0)
    assert device.operators["gelu"].value == [[4096, 0.001], [65536, 0.1235]]
    assert device.matmul is not None
    rate = device.matmul["fp32"]
    assert rate.share.value == pytest.approx(min(speed / 400, 1))  # of the best product
    assert rate.bandwidth_bytes_per_s.value == pytest.approx(1e6)
    assert len(found.measured) == len(plain.points)  # a busy moment's step of 0 s is none of them
    file = tmp_path / "here.yaml"
    file.write_text(cluster_yaml(found, "heading"))
    assert load_cluster(str(file)) == found


def test_no_step_of_the_ladder_is_one_that_is_predicted() -> None:
    shapes = {(cell.model_options["hidden"], cell.seq_len) for cell in LADDER}
    cells = load_scenario("closed_loop").cells[""]
    assert not shapes & {(cell.model_options["hidden"], cell.seq_len) for cell in cells}


#: of the large message, which takes a second longer than the small one
LARGE_BYTES = 4096
#: for monkeypatch: lets files have the figures of such machines, which are as slow as is easy to reckon with
ANY_FIGURE = ("spbench.bench.measure.clusters.cluster.implausible", lambda cluster: ())


def message(operation: str, ranks: int, small_s: float, large_s: float) -> list[RatePoint]:
    """A small and a large message."""
    factor = bus_factor(operation, ranks)
    return [
        RatePoint(operation, f"{n} B", n, "fp32", ranks, [seconds], nbytes=n, bus_factor=factor)
        for n, seconds in ((64, small_s), (LARGE_BYTES, large_s))
    ]


def machine(
    ranks: int = 2,
    per_node: int | None = None,
    device_type: str = "cpu",
    messages: tuple[str, ...] = (SEND,),
    step_s: float = 6.0,
) -> Machine:
    """Products at 100 and 400 FLOP/s, attention at 50, sums at 12 and 24 B/s, each message 1 ms and then a
    second more than the one before."""
    points = [
        RatePoint("matmul", "[5, 5] x [5, 5]", 5, "fp32", ranks, [0.5, 2.5, 9.0], flops=250),
        RatePoint("matmul", "[10, 10] x [10, 10]", 10, "fp32", ranks, [5.0], flops=2000),
        RatePoint("attention forward", "[1, 1, 5, 1]", 5, "fp32", ranks, [2.0], flops=100),
        RatePoint("sum", "16 B", 16, "fp32", ranks, [2.0], nbytes=48),
        RatePoint("sum", "4 B", 4, "fp32", ranks, [1.0], nbytes=12),
        RatePoint("training step", "bert-tiny", 8, "fp32", ranks, [step_s]),
    ]
    for place, operation in enumerate(messages if ranks > 1 else ()):
        points += message(operation, ranks, 0.001 + place, 1.001 + 2 * place)
    memory = (80 * 2**30, 2**29) if device_type == "cuda" else None
    return Machine(points, device_type, "a device", memory, ranks, per_node or ranks, kernels=100)
