"""Tables of measured times: calls on measured ones, between two and beyond; packaged files and errors.
The attention kernel that is taken where nobody says one, and those that a card cannot run.

Rates of attention kernels carried over from the card that has both kernels.
What is said of a cluster by kind of work: its figures, and the gaps."""

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters import rate_tables
from spbench.bench.measure.clusters.card_kernels import cannot_run, rate_of_call, usual_kernel
from spbench.bench.measure.clusters.cluster import Cluster, cluster_names, load_cluster
from spbench.bench.measure.clusters.figures import peak_in_half
from spbench.bench.measure.clusters.rate_tables import (
    RateTable,
    collective_tables,
    rate_table,
    rates_along,
    table_names,
)
from spbench.bench.measure.scenarios.choices import refusal
from spbench.bench.measure.scenarios.scenario import changed
from spbench.bench.measure.scenarios.select import ATTENTION, with_usual_attention
from spbench.bench.tools.run.kinds_of_work import kinds_of_work
from spbench.bench.tools.run.list_command import cluster_output
from spbench.impls.models.blocks.softmax_options import FUSED_KERNELS
from tests.grid import data, tabled
from tests.measure.simulator.step_programs import cluster

ERRORS = Path(__file__).parents[3] / "results" / "reproduction" / "interpolation.csv"


def test_a_measured_call_takes_what_it_took() -> None:
    table = rate_table("h200_sxm-matmul")
    assert table.work / table.rates(table.sizes) == pytest.approx(table.seconds)


def test_between_calls_rates_are_straight_in_logarithms_and_beyond_them_those_of_the_edge() -> None:
    table = RateTable(np.array([[1.0], [4.0]]), np.array([1.0, 1.0]), np.array([1.0, 16.0]))
    assert table.rates(np.array([[2.0], [1.0], [0.5], [8.0]])) == pytest.approx([4.0, 1.0, 1.0, 16.0])
    assert table.covers(np.array([[2.0], [0.5], [8.0]])).tolist() == [True, False, False]


def test_a_place_that_was_not_measured_has_the_rate_of_the_nearest() -> None:
    corners = np.array([[1.0, 1.0], [1.0, 4.0], [2.0, 1.0]])
    table = RateTable(corners, np.ones(3), np.array([1.0, 2.0, 8.0]))
    assert table.rates(np.array([[2.0, 4.0]])) == pytest.approx([2.0])  # as (1, 4), nearer than (2, 1)


def test_no_measured_rate_is_above_the_datasheet_s_peak() -> None:
    for name in cluster_names():
        cluster = load_cluster(name)
        for precision, rate in (cluster.device.matmul or {}).items():
            if rate.table.value is not None:
                table, peak = rate_table(rate.table.value), cluster.device.peak_flops_per_s[precision].value
                assert (table.work / table.seconds).max() < (peak or 0.0), name


def test_bytes_of_collectives_are_of_the_payload_as_bandwidths_show() -> None:
    """An all-gather of 8 H200 sends 7/8 of its bytes, at half to all of NVLink's 450 GB/s."""
    table = collective_tables("h200_sxm-collectives")["all_gather"]
    seconds = float(1 / table.rates(np.array([[8.0, 2.0**29]]))[0])
    assert 225e9 < 7 / 8 * 2**29 / seconds < 450e9


def test_square_matmuls_and_one_line_of_attention_are_found_for_figures() -> None:
    squares = rates_along("h200_sxm-matmul", 32, 8)
    assert list(squares) == [2048, 4096, 8192, 16384]
    assert 0.6 < squares[8192] / 989.4e12 < 0.9
    line = rates_along("h200_sxm-flash_attention_3", 32, 8)
    assert list(line)[0::7] == [2048, 16384]
    assert line[16384] > line[2048]


def test_attention_of_more_groups_reads_more_and_is_not_faster() -> None:
    table = rate_table("h200_sxm-flash_attention_3")
    assert table.rates(np.array([[2048, 32, 32.0]])) < table.rates(np.array([[2048, 32, 1.0]]))


@tabled(__file__, "a_damaged_table_is_told_by_line")
def test_a_damaged_table_is_told_by_line(rows: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_tables, "table_text", lambda name: f"m,n,k,us\n{rows}")
    with pytest.raises(UserError, match=problem):
        rate_tables._calls.__wrapped__("h100_sxm-matmul")


def test_the_committed_errors_are_of_the_packaged_tables_and_within_what_is_promised() -> None:
    with ERRORS.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["table"] for row in rows] == list(table_names())
    kinds = {"matmul": 0.042, "collectives": 0.06}
    for row in rows:
        most = kinds.get(row["table"].rpartition("-")[2], 0.053)
        assert 0 < float(row["median_error"]) <= most, row


@tabled(__file__, "the_usual_kernel_is_that_of_the_card")
def test_the_usual_kernel_is_that_of_the_card(cluster: str, kernel: str) -> None:
    assert usual_kernel(load_cluster(cluster).device) == kernel


def test_a_card_refuses_a_kernel_of_another_generation_with_the_reason() -> None:
    a100, h100 = (load_cluster(name).device for name in ("dgx-a100", "dgx-h100"))
    assert cannot_run(a100, "flash_attention_3") == (
        f"flash_attention_3 runs on Hopper alone, not on {a100.name}",
        "use model_options.attention=flash_attention_2",
    )
    assert cannot_run(h100, "flash_attention_3") is None
    assert cannot_run(load_cluster("b200-sxm").device, "flash_attention_3") is not None
    assert cannot_run(load_cluster("local").device, "flash_attention_3") is None  # not known
    cell = Cell(model="causal-transformer-tiny", strategy="single", cluster="dgx-a100", batch=1, seq_len=64)
    assert refusal(cell) == ""
    asked = changed(cell, {ATTENTION: "flash_attention_3"})
    assert "flash_attention_3 runs on Hopper alone" in refusal(asked)
    # what it names is the cause: another kernel, or another card, runs
    assert refusal(changed(asked, {ATTENTION: "flash_attention_2"})) == ""
    assert refusal(changed(asked, {"cluster": "dgx-h100"})) == ""


def test_what_nobody_says_is_taken_and_told_and_what_is_said_is_kept() -> None:
    plain = Cell(model="causal-transformer-tiny", strategy="single", cluster="dgx-h100", batch=1, seq_len=64)
    cell = plain.model_copy(update={"precision": "bf16"})
    assert with_usual_attention(plain) == (plain, "")  # no such kernel runs in float32
    taken, told = with_usual_attention(cell)
    assert taken.model_options["attention"] == "cudnn"
    assert told.startswith("attention: not said, so taken: cudnn, usual on NVIDIA H100")
    said = changed(cell, {ATTENTION: "triton"})
    assert with_usual_attention(said) == (said, "")
    without = cell.model_copy(update={"model": "bert-tiny"})  # which has no such option
    assert with_usual_attention(without) == (without, "")


def test_rates_of_latent_attention_are_of_its_calls_alone() -> None:
    h100, b200 = (load_cluster(name).device.attention for name in ("h100-sxm", "dgx-b200"))
    # a call's head size is the mean over its matmuls: 160 forward and 166 backward for 192 and 128
    for size, direction, reached in ((160, "forward", 553e12), (166, "backward", 422e12)):
        rate = h100.rate_of("cudnn", size, direction, "causal")
        assert rate.value_head_size == 128
        assert rate.at(4096) == pytest.approx(reached, rel=1e-3)
    for direction in ("forward", "backward"):
        rate = h100.rate_of("cudnn", 128, direction, "causal")
        assert rate.value_head_size is None
        assert b200.rate_of("cudnn", 128, direction, "causal") is None


CALL = (128, "forward", "causal")


def test_a_kernel_that_was_measured_has_its_own_rate() -> None:
    device = load_cluster("a100-sxm-80gb").device
    for kernel in ("triton", "flash"):
        assert rate_of_call(device, kernel, *CALL) == device.attention.rate_of(kernel, *CALL)


def test_another_has_the_ratio_of_both_kernels_on_the_card_that_has_both() -> None:
    measured, other = load_cluster("a100-sxm-80gb").device, load_cluster("a100-pcie-80gb").device
    rates = {
        (device.name, kernel): rate_of_call(device, kernel, 128, "backward", "causal")
        for device in (measured, other)
        for kernel in ("triton", "flash_attention_2")
    }
    at = {key: rate.at(32768) for key, rate in rates.items() if rate is not None}
    ratios = [
        at[device.name, "triton"] / at[device.name, "flash_attention_2"] for device in (measured, other)
    ]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-3)
    assert ratios[0] < 0.6
    carried = rates[other.name, "triton"]
    assert carried.limit_flops_per_s.substitute.startswith(
        "flash_attention_2's, by the ratio of both on NVIDIA A100"
    )


@pytest.mark.parametrize(("name", "kernel"), [("dgx-h100", "flash_attention_4"), ("dgx-a100", "cudnn")])
def test_a_ratio_above_the_peak_gives_way_to_the_share_of_the_peak(name: str, kernel: str) -> None:
    """FlashAttention-2 is slow on the card that has both, because it was written for an older one."""
    device = load_cluster(name).device
    for direction in ("forward", "backward"):
        rate = rate_of_call(device, kernel, 128, direction, "causal").limit_flops_per_s
        assert rate.substitute.startswith("its share of the peak of NVIDIA ")
        assert 0.5 < rate.value / device.peak_flops_per_s["bf16"].value < 0.85


def test_no_rate_of_a_packaged_cluster_is_above_the_peak() -> None:
    for name, kernel in itertools.product(cluster_names(), FUSED_KERNELS):
        device = load_cluster(name).device
        for size, direction in itertools.product((64, 128, 192), ("forward", "backward")):
            rate = rate_of_call(device, kernel, size, direction, "whole")
            # an RTX 4090's attention was measured above the peak of its datasheet, as its clock is higher
            assert rate is None or rate.limit_flops_per_s.value < 1.03 * peak_in_half(device), (name, kernel)


def test_without_a_kernel_in_common_or_any_rate_nothing_is_carried_over() -> None:
    without = load_cluster("a100-pcie-80gb").device
    assert rate_of_call(without.model_copy(update={"attention": None}), "triton", *CALL) is None
    alone = without.attention.model_copy(
        update={"kernels": {"cudnn": without.attention.kernels["flash_attention_2"]}}
    )
    assert rate_of_call(without.model_copy(update={"attention": alone}), "triton", *CALL) is None


def found(on: Cluster) -> dict[str, str]:
    return {kind.work: kind.figure for kind in kinds_of_work(on)}


def cluster_of(**device: Any) -> Cluster:
    document = cluster(devices=2).model_dump()
    document["device"] |= device
    return Cluster.model_validate(document)


def figure(value: float) -> dict[str, Any]:
    return {"value": value, "source": "made up", "note": "twice"}


def test_a_cluster_of_datasheets_has_gaps_for_all_but_its_links() -> None:
    assert found(cluster_of(launch_overhead_s={"value": None, "source": "unknown"})) == data(__file__)["GAPS"]


def test_the_host_s_memory_in_words() -> None:
    known = {"total_bytes": figure(2**41), "link_bandwidth_bytes_per_s": figure(52e9), "devices_per_link": 2}
    known["update_bytes_per_s"] = figure(24e10)
    known["pageable_to_host_bytes_per_s"] = figure(1.5e9)
    words = found(Cluster.model_validate(cluster_of().model_dump() | {"host_memory": known}))
    assert words["copy to or from the host"] == "26 GB/s a device, of a link of 2 devices"
    assert words["copy to pageable memory"] == "1.5 GB/s a device"
    assert words["update on the host's cores"] == "240 GB/s a node"
    assert words["memory of the host"] == "2048 GiB a node"


def test_rates_by_kind_of_work_in_words() -> None:
    rate = {"head_size": 64, "mask": "whole", "limit_flops_per_s": figure(2e14), "half_length": figure(300.0)}
    on = cluster_of(
        peak_flops_per_s={"bf16": figure(3e14)},
        matmul={"bf16": {"share": figure(0.8), "bandwidth_bytes_per_s": figure(3e12)}},
        attention={
            "default": "triton",
            "kernels": {"triton": [rate], "cudnn": [rate | {"direction": "forward"}]},
        },
        overlap_loss=figure(0.25),
    )
    words = found(on)
    assert words["matmuls, bf16"] == "0.8 of 300 TFLOP/s, and 3000 GB/s of operands"
    assert words["attention, triton, the default"] == "200 TFLOP/s / (1 + 300 / length), head 64, whole"
    assert words["attention, cudnn"] == "200 TFLOP/s / (1 + 300 / length), head 64, whole forward"
    assert words["attention, other kernels"] == "not known: it counts as matmuls"
    assert words["computing beside a collective"] == "loses 0.25 s a second"
    assert {kind.source for kind in kinds_of_work(on) if kind.work.startswith("matmul")} == {"made up: twice"}


def test_a_fitted_share_is_said_to_be_fitted() -> None:
    (matmuls,) = (kind for kind in kinds_of_work(load_cluster("a100-lasp")) if kind.work == "matmuls, bf16")
    assert matmuls[1:] == ("0.623 of 312 TFLOP/s", "calibration.bf16, fitted on 3 cells")


def test_a_host_by_kind_of_work() -> None:
    """Grace's own scale, on the figures of the file that its host extends."""
    words = found(load_cluster("gb200-nvl"))
    assert words["host, operator that launches"] == "12.9 us"
    assert words["host, step"] == "not known: it takes no time"
    assert words["host, launches ahead"] == "1024"
    assert words["host, scale of its times"] == "1.08"


def test_a_host_extends_that_of_a_packaged_cluster(tmp_path: Path) -> None:
    own = tmp_path / "ours.yaml"
    start = "extends: dgx-a100\nabout: ours\nhost:\n  extends: "
    own.write_text(start + "h100-sxm\n  scale: {value: 0.5, source: ours}\n")
    ours, theirs = load_cluster(str(own)).host, load_cluster("h100-sxm").host
    assert ours.seconds("operator_s") == 0.5 * theirs.seconds("operator_s")
    own.write_text(start + "h100-smx\n")
    with pytest.raises(UserError, match=r"ours.yaml: host.extends: unknown cluster 'h100-smx'.*h100-sxm"):
        load_cluster(str(own))


@pytest.mark.parametrize("name", cluster_names())
def test_every_figure_has_a_source_and_every_gap_is_named(name: str) -> None:
    output = cluster_output(name)
    assert all(bool(line["source"]) != line["figure"].startswith("not known") for line in output.records)
    assert output.content["gaps"] == [
        line["work"] for line in output.records if line["figure"].startswith("not known")
    ]


def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(UserError, match="unknown cluster 'l40'"):
        cluster_output("l40")


def test_null_takes_the_collectives_of_an_extended_file_away() -> None:
    link = load_cluster("h800-sxm").node_link
    assert link.collectives == {}
    above = load_cluster("h100-sxm").node_link
    assert "all_reduce" in above.collectives


def test_operators_are_counted() -> None:
    times = {"value": [[100.0, 5.0], [200.0, 7.0]], "source": "made up"}
    on = cluster_of(operators={"gelu": times, "add": times})
    assert found(on)["memory, by operator"] == "2 operators by times at 4 sizes"
