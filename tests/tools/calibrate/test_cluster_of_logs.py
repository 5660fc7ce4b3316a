"""Clusters from logs: rates that are known come back, and what no log says is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster, cluster_of_content, load_cluster
from spbench.bench.measure.clusters.rates import BusRate
from spbench.bench.tools.calibrate.cluster_of_logs import LogCluster, cluster_of_logs
from spbench.bench.tools.calibrate.log_findings import (
    Findings,
    TimedCollective,
    TimedMatmul,
    TimedPass,
    findings_of,
    is_same_card,
)
from spbench.bench.tools.calibrate.rate_fits import least_squares
from tests.grid import tabled
from tests.tools.calibrate.logs import Trace, flash_log, mamf_log, nccl_log

SHAPES = [(m, n, k) for m in (512, 4096) for n in (1024, 8192) for k in (128, 4096)]


def made_of(tmp_path: Path, base: str | None = "dgx-h100", **logs: str) -> LogCluster:
    """The cluster of logs with these contents, by the names of their files without .log."""
    found = {}
    for name, text in logs.items():
        path = tmp_path / f"{name}.log"
        path.write_text(text)
        found[path.name] = findings_of(path)
    return cluster_of_logs(found, load_cluster(base) if base else None)


def loaded(made: LogCluster) -> Cluster:
    """The cluster as it is read from its file."""
    return cluster_of_content(Path("made.yaml"), yaml.safe_dump(made.content).encode())


def rates(
    cluster: Cluster, kind: str, link: str = "node_link"
) -> list[tuple[int | None, float | None, float | None]]:
    """Ranks, latency and bandwidth of a collective's rates."""
    of_kind: list[BusRate] = getattr(cluster, link).collectives[kind]
    return [(rate.ranks, rate.latency_s.value, rate.bandwidth_bytes_per_s.value) for rate in of_kind]


def test_least_squares_by_hand() -> None:
    # (1 + 2x) at x = 1, 2, 4
    exact = least_squares([3.0, 5.0, 9.0], [1.0, 1.0, 1.0], [1.0, 2.0, 4.0])
    assert exact.coefficients == pytest.approx((1.0, 2.0))
    assert exact.largest_error < 1e-12
    # c of which (c / 1 - 1)^2 + (c / 2 - 1)^2 is least: (1 + 1/2) / (1 + 1/4) = 1.2; off by 0.2 and by 0.4
    one = least_squares([1.0, 2.0], [1.0, 1.0])
    assert (one.coefficients, one.mean_error, one.largest_error) == (
        pytest.approx((1.2,)),
        pytest.approx(0.3),
        pytest.approx(0.4),
    )
    # what falls has no slope below 0
    assert least_squares([2.0, 1.0], [1.0, 1.0], [0.0, 1.0]).coefficients[1] == 0


def test_collectives_of_a_node_come_back(tmp_path: Path) -> None:
    made = made_of(
        tmp_path,
        eight=nccl_log("all_reduce_perf", 30e-6, 360e9),
        two=nccl_log("all_reduce_perf", 15e-6, 340e9, ranks=2),
        gather=nccl_log("all_gather_perf", 25e-6, 350e9),
        send=nccl_log("sendrecv_perf", 10e-6, 330e9),
    )
    cluster = loaded(made)
    near = [(2, 15e-6, 340e9), (8, 30e-6, 360e9)]
    assert rates(cluster, "all_reduce") == [pytest.approx(each, rel=2e-3) for each in near]
    assert rates(cluster, "all_gather") == [pytest.approx((8, 25e-6, 350e9), rel=2e-3)]
    assert cluster.node_link is not None
    assert cluster.node_link.latency_s.value == pytest.approx(10e-6, rel=2e-3)
    assert cluster.node_link.bandwidth_bytes_per_s.value == pytest.approx(330e9, rel=2e-3)
    assert cluster.collective_model == "measured"
    assert "collectives" not in made.content.get("network", {})
    source = cluster.node_link.collectives["all_gather"][0].latency_s
    assert source.source == "gather.log (all_gather_perf of nccl-tests)"
    assert "10 points, off by 0.0% in the mean" in source.note


def test_between_nodes_a_card_has_its_part(tmp_path: Path) -> None:
    # of 70 us, a node's part is that of an all-gather of 8 ranks; 160 GB/s leave it by 8 cards. In an
    # all-to-all 8 of a device's 15 pieces leave the node
    made = made_of(
        tmp_path,
        within=nccl_log("all_gather_perf", 25e-6, 350e9),
        between=nccl_log("all_gather_perf", 70e-6, 160e9, ranks=16, hosts=2),
        send=nccl_log("sendrecv_perf", 12e-6, 45e9, ranks=16, hosts=2),
        exchange=nccl_log("alltoall_perf", 12e-6, 45e9, ranks=16, hosts=2),
    )
    cluster = loaded(made)
    assert rates(cluster, "all_gather", "network") == [pytest.approx((2, 45e-6, 20e9), rel=2e-3)]
    assert cluster.network.latency_s.value == pytest.approx(12e-6, rel=2e-3)
    assert cluster.network.bandwidth_bytes_per_s.value == pytest.approx(45e9, rel=2e-3)
    assert rates(cluster, "all_to_all", "network") == [pytest.approx((2, 12e-6, 24e9), rel=2e-3)]


def test_two_nodes_of_one_device_each(tmp_path: Path) -> None:
    cluster = loaded(made_of(tmp_path, a=nccl_log("all_reduce_perf", 40e-6, 20e9, ranks=2, hosts=2)))
    assert rates(cluster, "all_reduce", "network") == [pytest.approx((2, 40e-6, 20e9), rel=2e-3)]


def test_too_few_sizes_have_no_latency() -> None:
    point = TimedCollective("all_reduce", 8, 1, 2**30, 5e-3)
    cluster = loaded(cluster_of_logs({"a": Findings("b", collectives=[point])}, load_cluster("dgx-h100")))
    assert rates(cluster, "all_reduce") == [(8, None, pytest.approx(1.75 * 2**30 / 5e-3, rel=1e-3))]


def test_products_come_back(tmp_path: Path) -> None:
    cluster = loaded(made_of(tmp_path, a=mamf_log(800e12, 4e12, SHAPES)))
    assert cluster.device.matmul is not None
    rate = cluster.device.matmul["bf16"]
    assert rate.share.value == pytest.approx(800 / 989.4, rel=5e-3)
    assert rate.bandwidth_bytes_per_s.value == pytest.approx(4e12, rel=5e-3)


def test_one_product_is_a_share_for_all_shapes() -> None:
    base = load_cluster("a100-sxm-80gb")
    product = TimedMatmul.of_shape("bf16", 8192, 8192, 8192, 2 * 8192**3 / 156e12)
    rate = loaded(cluster_of_logs({"a": Findings("b", matmuls=[product])}, base)).device.matmul
    assert rate is not None
    assert rate["bf16"].share.value == 0.5  # of 312
    # the bandwidth that the base has from elsewhere does not stay beside it
    assert base.device.matmul is not None
    assert base.device.matmul["bf16"].bandwidth_bytes_per_s.value is not None
    assert rate["bf16"].bandwidth_bytes_per_s.value is None


def test_attention_comes_back(tmp_path: Path) -> None:
    made = made_of(tmp_path, "h100-sxm", a=flash_log(420e12, 700.0), b=flash_log(300e12, 200.0, False, 64))
    attention = loaded(made).device.attention
    assert attention is not None
    assert attention.default == "flash_attention_2"
    found = {
        (rate.head_size, rate.mask, rate.direction): (rate.limit_flops_per_s.value, rate.half_length.value)
        for rate in attention.kernels["flash_attention_2"]
    }
    assert found == {
        (128, "causal", "forward"): pytest.approx((420e12, 700), rel=2e-3),
        (128, "causal", "backward"): pytest.approx((336e12, 700), rel=2e-3),
        (64, "whole", "forward"): pytest.approx((300e12, 200), rel=2e-3),
        (64, "whole", "backward"): pytest.approx((240e12, 200), rel=2e-3),
    }
    # what the base has of another kernel stays
    assert attention.kernels["flash_attention_3"]


def step(bandwidth: float = 2.68e12, gap_us: float = 3.0) -> str:
    """A trace of twelve sums, of 3 x 64 MiB and more."""
    trace, elements = Trace(gap_us), 2**25
    for rows in (1, 2, 4, 8) * 3:
        shape = (rows, elements)
        trace.launch("aten::add", [shape, shape], 3 * 2 * rows * elements / bandwidth * 1e6)
        trace.now += 5000 * (len(trace.events) == 10)  # a pause, as at a step's end
    return json.dumps(trace.content())


def test_memory_and_launches_come_back(tmp_path: Path) -> None:
    device = loaded(made_of(tmp_path, "h100-sxm", a=step())).device
    assert device.memory_efficiency.value == pytest.approx(0.8)
    assert device.launch_overhead_s.value == pytest.approx(3e-6)
    assert device.kernel_floor_s.value is None  # h100-sxm has one


def test_memory_that_is_too_fast_is_left_out(tmp_path: Path) -> None:
    made = made_of(tmp_path, a=step(bandwidth=4e12))
    assert "memory_efficiency" not in made.content["device"]
    assert any("above the datasheet's 3.35" in remark for remark in made.remarks)
    assert "memory" in made.missing


def test_passes_that_caches_hold_are_left_out() -> None:
    launches = Findings("b", passes=[TimedPass(2**27 - 1, 1e-5)], launch_gaps_s=[1e-6] * 10)
    made = cluster_of_logs({"a": launches}, load_cluster("dgx-h100"))
    assert "memory_efficiency" not in made.content["device"]
    assert any("no element-wise kernel moves 128 MiB" in remark for remark in made.remarks)


def test_alone_a_cluster_has_what_the_logs_say(tmp_path: Path) -> None:
    made = made_of(
        tmp_path,
        None,
        a=mamf_log(800e12, 4e12, SHAPES),
        b=step(),
        c=nccl_log("all_reduce_perf", 30e-6, 360e9),
    )
    cluster = loaded(made)
    assert cluster.device.name == "NVIDIA H100 80GB HBM3"
    assert cluster.device.memory_total_bytes.value == 85029158912
    assert cluster.device.peak_flops_per_s["bf16"].value == pytest.approx(800e12, rel=5e-3)
    assert cluster.device.memory_bandwidth_bytes_per_s.value == pytest.approx(2.68e12)
    assert (cluster.devices_per_node, cluster.network.bandwidth_bytes_per_s.value) == (8, None)
    assert "send, intra-node" in made.missing


def test_a_fitted_scalar_does_not_correct_a_measured_rate(tmp_path: Path) -> None:
    base = load_cluster("dgx-b200")
    assert base.calibration["bf16"].compute_efficiency != 1
    cluster = loaded(made_of(tmp_path, "dgx-b200", a=mamf_log(1500e12, 4e12, SHAPES, card="NVIDIA B200")))
    assert cluster.calibration["bf16"].compute_efficiency == 1
    assert cluster.calibration["bf16"].fitted_on == []  # so no cell counts as calibrated


@tabled(__file__, "names_of_cards")
def test_names_of_cards(of_driver: str, of_cluster: str, same: bool) -> None:
    assert is_same_card(of_driver, of_cluster) is same


def test_alone_a_card_that_is_known_has_its_datasheet(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2500 TFLOP/s of bf16 is above the 2250 of NVIDIA B200 SXM6 180 GB"):
        made_of(tmp_path, None, a=mamf_log(2500e12, 1e20, SHAPES, card="NVIDIA B200"))
    made = made_of(tmp_path, None, a=mamf_log(2500e12, 1e20, SHAPES, card="NVIDIA R300"))
    assert made.fitted  # of a card that nobody has described nothing is above its datasheet


def test_times_of_any_reader_are_positive() -> None:
    """A plug-in reads its logs as it likes."""
    for seconds in (0.0, -1e-3, float("nan"), float("inf")):
        wrong = Findings("mine", passes=[TimedPass(2**30, seconds)])
        with pytest.raises(UserError, match=r"a \(mine\): a time of .* s cannot be"):
            cluster_of_logs({"a": wrong}, None)


def test_what_is_missing() -> None:
    product = TimedMatmul.of_shape("bf16", 8192, 8192, 8192, 2e-3)
    made = cluster_of_logs({"a": Findings("b", matmuls=[product])}, load_cluster("dgx-h100"))
    assert made.missing == [
        *("matmuls, fp16", "matmuls, fp32", "attention", "memory", "gaps between kernels"),
        "send, intra-node",
        *(f"{kind}, intra-node" for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
        "send, inter-node",
        *(f"{kind}, inter-node" for kind in ("all_reduce", "all_gather", "reduce_scatter")),
    ]


@pytest.mark.parametrize(
    ("logs", "complaint"),
    [
        (
            {"a": mamf_log(1200e12, 1e20, SHAPES)},
            "1200 TFLOP/s of bf16 is above the 989.4 of dgx-h100",
        ),
        (
            {
                "a": nccl_log("all_reduce_perf", 1e-5, 1e11),
                "b": nccl_log("sendrecv_perf", 1e-5, 1e11, card="L20"),
            },
            "logs of several cards: NVIDIA H100 80GB HBM3 (a.log), L20 (b.log)",
        ),
        (
            {"a": flash_log(3.3e15, 300.0)},
            "TFLOP/s of flash_attention_2, causal, forward at 512 tokens is above the 989.4 of dgx-h100",
        ),
        (
            {"a": nccl_log("all_reduce_perf", 1e-5, 1.5e12)},
            "GB/s of all_reduce of 16777216 bytes on 8 ranks is above the 734 of dgx-h100",
        ),
        (
            {"a": nccl_log("all_gather_perf", 1e-6, 4e12, ranks=16, hosts=2)},
            "GB/s of all_gather of 134217728 bytes on 16 ranks is above the 3350 of dgx-h100",
        ),
        (
            {"a": nccl_log("all_reduce_perf", 1e-5, 1e11, card="NVIDIA H100 PCIe")},
            "the logs come from NVIDIA H100 PCIe, and dgx-h100 has NVIDIA H100 SXM5 80 GB",
        ),
        ({"a": nccl_log("all_reduce_perf", 1e-5, 1e30, sizes=(8, 64, 512))}, "the logs give no figure"),
    ],
    ids=[
        *("faster than its card", "two cards", "attention", "within a node", "between nodes", "another card"),
        "no bandwidth",
    ],
)
def test_what_is_refused(tmp_path: Path, logs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        made_of(tmp_path, **logs)
    assert complaint in str(raised.value)
