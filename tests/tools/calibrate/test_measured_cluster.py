"""Rates that are measured on real ranks, and the cluster that follows from them.

Predicted steps beside measured ones: the arithmetic, on made-up times. Calibration: planted scalars are
found again, and mistakes in what to fit are told in one line.
"""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from spbench.bench.cell import Cell, Sizes
from spbench.bench.command_line.output import Output
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.card_kernels import RatesUnknown, check_rates
from spbench.bench.measure.clusters.cluster import Calibration, load_cluster
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.sweep.sweep import digest
from spbench.bench.measurement import Measurement
from spbench.bench.tools.calibrate import compute_rates, ways
from spbench.bench.tools.calibrate.collective_rates import SEND, SEND_BETWEEN, SEND_WITHIN, bus_factor
from spbench.bench.tools.calibrate.compute_rates import SMALL, RatePoint
from spbench.bench.tools.calibrate.fit import TABLES, Fit, Known, chosen, fitted, profile, residuals, summary
from spbench.bench.tools.calibrate.machine_report import cluster_yaml, sample_rows
from spbench.bench.tools.calibrate.measured_cluster import _on_rank, cluster_of
from spbench.bench.tools.calibrate.operator_times import OPERATOR
from spbench.bench.tools.calibrate.ways import agreement, compared, figures, predicted
from spbench.bench.tools.papers.answers.tables import PublishedTable
from spbench.bench.tools.papers.selector import PublishedRow
from tests.grid import tabled
from tests.terminal import screen_of
from tests.tools.calibrate.faulty_ranks import TINY, faulty_sums, short_of_memory
from tests.tools.calibrate.test_operator_times import ANY_FIGURE, LARGE_BYTES, machine

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", SEND)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_measure_together_and_agree(pool: RankPool, n: int) -> None:
    cell = SMALL.model_copy(update={"sizes": Sizes(sp=n)})
    found: list[dict[str, Any]] = pool.run({"sp": n}, _on_rank, cell, TINY)
    assert all(rank == found[0] for rank in found)
    points = found[0]["points"]
    assert Counter(point.operation for point in points) == {
        "matmul": 4,
        **dict.fromkeys(("attention forward", "attention forward and backward", "sum", "training step"), 1),
        **dict.fromkeys(COLLECTIVES if n > 1 else (), 2),  # 3 bytes are less than an element a rank
    }
    assert all(len(point.samples_s) == 2 and min(point.samples_s) > 0 for point in points)
    assert sum(point.wrong for point in points) == 0
    assert {point.nbytes % (4 * n) for point in points if point.operation in COLLECTIVES} <= {0}
    assert found[0]["per_node"] == n
    (product, *_) = (point for point in points if point.size == "[32, 8] x [8, 32]")
    assert product.flops == 2 * 32 * 8 * 32


def test_wrong_results_are_counted(pool: RankPool) -> None:
    points = pool.run({"sp": 2}, faulty_sums, TINY)[0]
    assert {point.operation: point.wrong for point in points} == {
        **dict.fromkeys(COLLECTIVES, 0),
        "all_reduce": 2,  # an element on each of two ranks
    }


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bus_bandwidth_is_that_of_nccl_tests(n: int) -> None:
    # its PERFORMANCE.md, and sendrecv.cu
    assert bus_factor("all_reduce", n) == pytest.approx(2 * (n - 1) / n)
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(operation, n) == pytest.approx((n - 1) / n)
    for operation in (SEND, SEND_WITHIN, SEND_BETWEEN):
        assert bus_factor(operation, n) == 1


def test_calls_that_would_take_long_are_left_out(pool: RankPool) -> None:
    cell = SMALL.model_copy(update={"sizes": Sizes()})
    brief = replace(TINY, longest_call_s=1e-12)
    points = pool.run({"sp": 1}, _on_rank, cell, brief)[0]["points"]
    assert [point.extent for point in points if point.operation == "matmul"] == [4, 4]


def test_a_size_for_which_a_rank_has_no_memory_ends_the_series_on_all(pool: RankPool) -> None:
    assert pool.run({"sp": 2}, short_of_memory) == [[1, 2], [1, 2]]


def test_figures_follow_from_the_points() -> None:
    found = cluster_of(machine(), "here", "a source")
    assert figures(found) == {
        "flops_per_s": 400,  # the best shape
        "memory_bandwidth_bytes_per_s": 24,  # of the largest tensors
        "operator_s": None,  # no step's operators were timed
        "latency_s": 0.001,
        "bandwidth_bytes_per_s": LARGE_BYTES,  # in the second that it takes longer
    }
    assert found.device.launch_overhead_s.value == 0.06
    assert found.device.peak_flops_per_s["fp32"].note == (
        "[10, 10] x [10, 10], the best of 2 shapes; attention forward: 50 at most"
    )
    assert (found.devices_per_node, found.node_link) == (1, None)
    product = found.measured[0]
    assert (product.seconds, product.flops_per_s) == (2.5, 100)  # of the median sample
    check_rates(found, "fp32", 64)
    with pytest.raises(RatesUnknown, match="no fp64"):
        check_rates(found, "fp64", 2)


def test_one_rank_has_no_link() -> None:
    found = cluster_of(machine(ranks=1), "here", "a source")
    check_rates(found, "fp32", 1)
    with pytest.raises(RatesUnknown, match="latency or bandwidth"):
        check_rates(found, "fp32", 2)


def test_gpus_of_one_node_have_a_link_and_no_network() -> None:
    found = cluster_of(machine(ranks=8, device_type="cuda"), "here", "a source")
    assert found.devices_per_node == 8
    assert found.node_link is not None
    assert found.node_link.bandwidth_bytes_per_s.value == LARGE_BYTES
    assert found.usable_memory_bytes == 80 * 2**30 - 2**29
    check_rates(found, "fp32", 8)
    with pytest.raises(RatesUnknown):
        check_rates(found, "fp32", 9)


@pytest.mark.parametrize("per_node", [1, 4])
def test_several_nodes_have_a_network(per_node: int) -> None:
    messages = (SEND, SEND_BETWEEN, SEND_WITHIN)
    found = cluster_of(machine(8, per_node, "cuda", messages), "here", "a source")
    assert (found.devices_per_node, found.network.nics_per_node) == (per_node, per_node)
    assert found.network.bandwidth_bytes_per_s.value == LARGE_BYTES / 2
    within = None if found.node_link is None else found.node_link.latency_s.value
    assert within == (2.001 if per_node > 1 else None)


def test_noise_that_puts_the_large_message_first_gives_a_bandwidth_all_the_same() -> None:
    noisy = machine()
    points = [
        replace(point, samples_s=[2.0 if point.extent == LARGE_BYTES else 3.0]) for point in noisy.points
    ]
    found = cluster_of(replace(noisy, points=points), "here", "a source")
    assert found.network.bandwidth_bytes_per_s.value == LARGE_BYTES / 2


def test_the_file_gives_the_same_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*ANY_FIGURE)
    source = "measured on host, with: spbench calibrate --engine distributed"
    for made in (machine(), machine(8, 4, "cuda", (SEND, SEND_BETWEEN, SEND_WITHIN)), machine(1)):
        cluster = cluster_of(made, "here", source)
        file = tmp_path / "here.yaml"
        file.write_text(cluster_yaml(cluster, "two\nlines"))
        assert load_cluster(str(file)) == cluster
        assert file.read_text().startswith("# two\n# lines\nabout: ")
        measured = [figure for _, figure in cluster.sourced if figure.value]
        assert {figure.source for figure in measured} == {source}


def test_what_nothing_is_computed_from_is_in_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*ANY_FIGURE)
    cluster = cluster_of(machine(), "here", "a source")
    digests = []
    for measured in (cluster.measured, cluster.measured[:1]):
        file = tmp_path / "here.yaml"
        file.write_text(cluster_yaml(cluster.model_copy(update={"measured": measured}), "heading"))
        digests.append(digest(SMALL.model_copy(update={"cluster": str(file)}))["cluster"])
    assert digests[0] == digests[1]


def test_every_sample_is_a_row() -> None:
    rows = sample_rows(machine().points)
    assert [row["seconds"] for row in rows[:3]] == [0.5, 2.5, 9.0]
    assert [row["sample"] for row in rows[:4]] == [0, 1, 2, 0]
    assert {row["size"] for row in rows[:3]} == {"[5, 5] x [5, 5]"}


def test_a_size_that_takes_just_as_long_as_a_call_may_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of the size before: half a second for a byte."""
    monkeypatch.setattr(compute_rates, "_made_on_all_ranks", lambda make, device: make)
    monkeypatch.setattr(compute_rates, "timed", lambda call, device, sweep: [0.5 * call()])
    sums = [RatePoint("sum", f"{n} B", n, "fp32", 1, [], nbytes=n) for n in (1, 2, 3)]
    trials = [(point, lambda nbytes=point.nbytes: nbytes) for point in sums]
    points = [*compute_rates._series(trials, "cpu", replace(TINY, longest_call_s=1.0))]
    assert [point.samples_s for point in points] == [[0.5], [1.0]]


def row(measured: float, simulated: float, seq_len: int = 128, spread: float = 0.0) -> dict[str, Any]:
    cell = Cell(model="bert-mini", strategy="single", batch=2, seq_len=seq_len)
    parts = {f"{name}_s": 0.0 for name in ("compute", "overhead", "exposed_communication", "bubble")}
    samples = [measured - spread, measured, measured + spread]
    return compared(cell, samples, {"step_time_s": simulated, **parts})


def test_order_and_errors() -> None:
    # 2 and 3 are the wrong way round, and their samples overlap; the other shape is far away
    found = agreement([row(1, 1), row(2, 6, spread=0.6), row(3, 4, spread=0.6), row(100, 50, seq_len=256)])
    assert found["tau"] == pytest.approx(4 / 6)  # five of six pairs alike, one not
    assert (found["clear_pairs"], found["clear_pairs_alike"]) == (2, 2)
    assert found["worst_error"] == pytest.approx(2.0)
    assert found["median_error"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert TABLES.text("agreement", found) == (
        "error: median 42%, worst 200%; Kendall's tau 0.67; of pairs of one shape whose samples do not "
        "overlap 2 of 2 in the measured order"
    )
    reverse = agreement([row(1, 3), row(2, 2), row(3, 1)])
    assert reverse["tau"] == pytest.approx(-1)
    assert (reverse["clear_pairs"], reverse["clear_pairs_alike"]) == (3, 0)


def test_the_cells_have_each_strategy_on_each_number_of_ranks() -> None:
    chosen = load_scenario("closed_loop").cells[""]
    assert len({cell.key for cell in chosen}) == len(chosen) == 15
    assert {(cell.strategy, cell.sizes.world) for cell in chosen} == {
        ("single", 1),
        *((name, n) for name in ("tensor_parallel", "ring_self_attention") for n in (2, 4)),
    }


def test_the_figures_time_a_cell() -> None:
    cell = SMALL.model_copy(update={"strategy": "ring_self_attention", "sizes": Sizes(sp=2)})
    plain = machine(step_s=200.0)
    quick = cluster_of(machine(step_s=100.0), "local", "measured")
    found, less = predicted(cell, cluster_of(plain, "local", "measured")), predicted(cell, quick)
    assert found["overhead_s"] == pytest.approx(2 * less["overhead_s"])
    assert found["step_time_s"] > found["overhead_s"] > 100
    norms = RatePoint(OPERATOR + "layer_norm", "", 4096, "fp32", 2, [1e6], nbytes=4096)
    slow = cluster_of(replace(plain, points=[*plain.points, norms]), "local", "measured")
    # one of the embeddings, two of each layer, one of the head
    assert predicted(cell, slow)["compute_s"] - found["compute_s"] == pytest.approx(6e6, rel=0.01)


def test_cells_are_measured_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    def measure(cell: Cell) -> Measurement:
        order.append(cell.batch)
        return Measurement(step_time_samples_s=[float(len(order))])

    monkeypatch.setattr(ways.measure, "run_cell", measure)
    cells = [SMALL.model_copy(update={"batch": n}) for n in (1, 2)]
    assert ways.measured_samples(cells) == [[1.0, 3.0], [2.0, 4.0]]
    assert order == [1, 2, 1, 2]


def known(size: int, compute_s: float, network_s: float, published: Calibration, noise: float = 1.0) -> Known:
    """A cell that computes and then communicates, and was published as under that calibration."""

    def simulator(c: Calibration) -> Any:
        seconds = compute_s / c.compute_efficiency + network_s / c.link_efficiency + c.step_overhead_s
        return SimpleNamespace(step_time_s=seconds)

    cell = Cell(model="bert-tiny", strategy="tensor_parallel", sizes=Sizes(tp=size), batch=8, seq_len=size)
    row = PublishedRow(1, {"size": str(size), "tokens": "1"})
    return Known(row, cell, simulator(published).step_time_s * noise, simulator)


TRUTH = Calibration(compute_efficiency=0.4, link_efficiency=0.25)
FITS = [Fit.parse("compute_efficiency:size=1"), Fit.parse("link_efficiency:size=2")]
TABLE = PublishedTable.model_validate(
    {
        "table": "made-up",
        "published": {"file": "none.csv"},
        "match": {"size": "parallel"},
        "quantities": {"tokens": {"field": "tokens_per_s"}},
    }
)


def test_planted_scalars_are_found() -> None:
    cells = [known(1, 1.0, 0.0, TRUTH), known(2, 0.5, 0.1, TRUTH), known(4, 0.25, 0.15, TRUTH)]
    found = fitted(FITS, cells)
    assert found.compute_efficiency == pytest.approx(0.4, rel=1e-9)
    assert found.link_efficiency == pytest.approx(0.25, rel=1e-9)
    assert found.fitted_on == [cells[0].cell.key, cells[1].cell.key]
    lines = residuals(FITS, cells, TABLE, "tokens")
    assert [line["role"] for line in lines] == ["calibrated", "calibrated", "held out"]
    assert lines[2]["relative_error"] == pytest.approx(0, abs=1e-9)
    assert summary(lines) == "1 cells held out: median error 0.0%, worst 0.0%"
    copied = yaml.safe_load(screen_of(Output([profile(found, "fp16")]), 40))
    assert copied["calibration"]["fp16"]["fitted_on"] == found.fitted_on
    cost = fitted(
        [Fit.parse("step_overhead_s:size=1")], [known(1, 1.0, 0.0, Calibration(step_overhead_s=0.3))]
    )
    assert cost.step_overhead_s == pytest.approx(0.3, rel=1e-9)


def test_fits_that_move_each_other_settle() -> None:
    """Every cell has all three costs, so no scalar can be fitted before the others."""
    truth = Calibration(compute_efficiency=0.4, link_efficiency=0.25, step_overhead_s=0.3)
    cells = [known(1, 0.1, 0.01, truth), known(2, 5.0, 0.02, truth), known(4, 0.2, 4.0, truth)]
    fits = ["step_overhead_s:size=1", "compute_efficiency:size=2", "link_efficiency:size=4"]
    found = fitted([Fit.parse(text) for text in fits], cells)
    assert found.scalars == pytest.approx(truth.scalars, rel=1e-3)


def test_rows_that_disagree_share_the_error_and_leaving_one_out_shows_it() -> None:
    cells = [known(1, 1.0, 0.0, TRUTH, 1.1), known(1, 2.0, 0.0, TRUTH, 1 / 1.1)]
    lines = residuals(FITS[:1], cells, TABLE, "tokens")
    assert lines[0]["relative_error"] == pytest.approx(1 / 1.1 - 1)
    assert lines[1]["relative_error"] == pytest.approx(0.1)
    assert lines[0]["left_out"] == pytest.approx(math.pow(1.1, -2) - 1)
    assert summary(lines) == "no cell is held out: all were fitted on"


@tabled(__file__, "fits_that_cannot_be_read_or_have_no_rows")
def test_fits_that_cannot_be_read_or_have_no_rows(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen(Fit.parse(text), [known(1, 1.0, 0.0, TRUTH)])
