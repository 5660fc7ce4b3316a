"""Rates of a cluster by size, against what a simulation of one kernel or one message takes by hand."""

from typing import Any

import pytest

from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.tools.run.list_command import MESSAGES, attention_curves, link_curves, product_curves
from tests.measure.simulator.step_programs import cluster
from tests.measure.simulator.test_card_rates import figure


def with_figures(on: Cluster, **changes: dict[str, Any]) -> Cluster:
    document = on.model_dump()
    for section, figures in changes.items():
        document[section] |= figures
    return Cluster.model_validate(document)


def test_products_pay_for_their_operands_and_the_floor() -> None:
    """n = 128: 2 n^3 FLOPs at half of 1000 a second, and 3 x 4 n^2 bytes at 100 a second."""
    matmuls = {"fp32": {"share": figure(0.5), "bandwidth_bytes_per_s": figure(100.0), "measured": {8: 7.0}}}
    on = with_figures(cluster(rate=1000.0), device={"matmul": matmuls, "kernel_floor_s": figure(1e5)})
    (curve,) = product_curves(on)
    flops, nbytes = 2 * 128**3, 12 * 128**2
    assert (curve.panel, curve.name, curve.measured) == ("Matmuls", "fp32", {8: 7.0})
    assert curve.rates[0] == flops / 1e5  # of 8389 + 1966 seconds, which are less than the floor
    assert curve.rates[2] == pytest.approx(64 * flops / (64 * flops / 500 + 16 * nbytes / 100))


def test_attention_has_a_line_a_rate() -> None:
    rate = {"head_size": 64, "mask": "causal", "limit_flops_per_s": figure(90.0), "half_length": figure(512)}
    known = {"default": "triton", "kernels": {"triton": [rate, {**rate, "direction": "backward"}]}}
    both, backward = attention_curves(with_figures(cluster(), device={"attention": known}))
    assert (both.panel, both.name, backward.name) == (
        "Attention, triton",
        "64, causal, both",
        "64, causal, backward",
    )
    assert both.rates[:2] == [45.0, 60.0]


def test_links_within_a_node_and_between() -> None:
    """A ring's bus bandwidth is its hop's, but for the latencies of 6 hops of an all-reduce of 4 ranks."""
    on = cluster(devices=4, nics=4, node_bandwidth=1e9, node_latency=1e-6, bandwidth=1e8, latency=1e-5)
    curves = {
        (curve.panel, curve.name): dict(zip(curve.sizes, curve.rates, strict=True))
        for curve in link_curves(on)
    }
    assert [name for panel, name in curves if panel == "On two nodes"] == [
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    ]
    assert [name for panel, name in curves if panel == "All-reduce by ranks"] == [
        *("2 ranks", "4 ranks", "2 nodes", "4 nodes", "16 nodes", "64 nodes")
    ]
    size = MESSAGES[-1]
    wire = 1.5 * size
    assert curves["Within a node", "all_reduce"][size] == pytest.approx(wire / (wire / 1e9 + 6e-6))
    assert curves["Within a node", "send"][size] == pytest.approx(size / (size / 1e9 + 1e-6))
    # four devices of a node send at once, each by a card
    assert curves["On two nodes", "send"][size] == pytest.approx(size / (size / 1e8 + 1e-5))


def test_a_link_that_is_not_known_has_no_line() -> None:
    unknown = with_figures(
        cluster(devices=1), network={"bandwidth_bytes_per_s": {"value": None, "source": ""}}
    )
    assert [*link_curves(unknown)] == []
