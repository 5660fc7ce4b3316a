"""The attention kernel that is taken where nobody says one, and those that a card cannot run.

Rates of attention kernels carried over from the card that has both kernels.
"""

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.carried_rates import rate_of_call
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.clusters.kinds_of_work import cannot_run, usual_kernel
from spbench.bench.measure.scenarios.choices import refusal
from spbench.bench.measure.scenarios.scenario import changed
from spbench.bench.measure.scenarios.select import ATTENTION, with_usual_attention


@pytest.mark.parametrize(
    ("cluster", "kernel"),
    [
        ("dgx-h100", "cudnn"),
        ("h800-sxm", "cudnn"),
        ("b200-sxm", "cudnn"),
        ("dgx-a100", "flash_attention_2"),
        ("l20", "flash_attention_2"),
        ("l40s", "flash"),
        ("local", "flash"),
    ],
)
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
    assert carried.limit_flops_per_s.substitute.startswith(
        "flash_attention_2's, by the ratio of both on NVIDIA A100"
    )


def test_without_a_kernel_in_common_or_any_rate_nothing_is_carried_over() -> None:
    without = load_cluster("a100-pcie-80gb").device
    assert rate_of_call(without.model_copy(update={"attention": None}), "triton", *CALL) is None
    alone = without.attention.model_copy(
        update={"kernels": {"cudnn": without.attention.kernels["flash_attention_2"]}}
    )
    assert rate_of_call(without.model_copy(update={"attention": alone}), "triton", *CALL) is None
