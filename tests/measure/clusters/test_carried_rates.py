"""Rates of attention kernels carried over from the card that has both kernels."""

from __future__ import annotations

import pytest

from spbench.bench.measure.clusters.carried_rates import rate_of_call
from spbench.bench.measure.clusters.cluster import load_cluster

CALL = (128, "forward", "causal")


def test_a_kernel_that_was_measured_has_its_own_rate() -> None:
    device = load_cluster("a100-sxm-80gb").device
    assert device.attention is not None
    for kernel in ("triton", "flash"):
        assert rate_of_call(device, kernel, *CALL) == device.attention.rate_of(kernel, *CALL)


def test_another_has_the_ratio_of_both_kernels_on_the_card_that_has_both() -> None:
    measured, other = load_cluster("a100-sxm-80gb").device, load_cluster("a100-pcie-80gb").device
    rates = {
        (device.name, kernel): rate_of_call(device, kernel, *CALL)
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
    assert carried is not None
    assert carried.limit_flops_per_s.substitute.startswith(
        "flash_attention_2's, by the ratio of both on NVIDIA A100"
    )


def test_without_a_kernel_in_common_or_any_rate_nothing_is_carried_over() -> None:
    without = load_cluster("a100-pcie-80gb").device
    assert rate_of_call(without.model_copy(update={"attention": None}), "triton", *CALL) is None
    assert without.attention is not None
    alone = without.attention.model_copy(
        update={"kernels": {"cudnn": without.attention.kernels["flash_attention_2"]}}
    )
    assert rate_of_call(without.model_copy(update={"attention": alone}), "triton", *CALL) is None
