"""Products by shape and attention by kernel, against seconds worked out by hand. FlashAttention-2 on calls
unlike those that were measured.
"""

from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.engines import virtual
from spbench.bench.measure.simulator import table_prices as grid
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import ATTENTION, KERNEL, MATMUL
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.trace.operator_prices import price_of
from tests.measure.simulator.step_programs import cluster
from tests.measure.simulator.test_cost_forms import changed


def figure(value: float | None) -> dict[str, Any]:
    return {"value": value, "source": "made up"}


def with_card(**device: Any) -> Cluster:
    """A cluster of 1 FLOP a second in float32 and 1000 in bfloat16, with these figures of its card."""
    document = cluster().model_dump()
    document["device"]["peak_flops_per_s"]["bf16"] = figure(1000.0)
    document["device"] |= device
    return Cluster.model_validate(document)


def rate(limit: float, half: float | None = None, **of: Any) -> dict[str, Any]:
    return {
        "head_size": 8,
        "mask": "causal",
        "limit_flops_per_s": figure(limit),
        "half_length": figure(half),
        **of,
    }


ATTENTION_RATES = {
    "default": "flash_attention_2",
    "kernels": {
        "flash_attention_1": [rate(10.0)],
        "flash_attention_2": [
            rate(100.0, 4.0, direction="forward"),
            rate(50.0, 4.0, direction="backward"),
            rate(200.0, direction="forward", mask="whole"),
            rate(25.0, direction="forward", head_size=2),
            rate(70.0, direction="backward", head_size=2),
        ],
    },
}


def attention_seconds(
    on: Cluster,
    kernel: str,
    queries: int,
    keys: int,
    causal: bool,
    size: int = 8,
    dtype: Any = torch.bfloat16,
    calibration: Calibration | None = None,
) -> list[float]:
    """Seconds of one head's forward and backward kernel, priced as a step's operators are."""
    q, k = torch.empty(1, 1, queries, size, dtype=dtype), torch.empty(1, 1, keys, size, dtype=dtype)
    lse = torch.empty(1, 1, queries)
    b = ProgramBuilder((1, 1, 1, 1))
    for func, args in (
        (torch.ops.spbench.flash_attention.default, (q, k, k, 1.0, causal)),
        (torch.ops.spbench.flash_attention_backward.default, (q, q, k, k, q, lse, 1.0, causal)),
    ):
        price = price_of(func)
        b.add_kernel((KERNEL, b.named(price.name), *price.of(args, {}, None)))
    return Costs(on, calibration or Calibration(), attention=kernel).kernels(b.program()).tolist()


def test_a_product_by_shape_pays_for_its_operands() -> None:
    """In its precision alone: FLOPs / (peak x share) + bytes / bandwidth."""
    matmuls = {"bf16": {"share": figure(0.5), "bandwidth_bytes_per_s": figure(4.0)}}
    b = ProgramBuilder((1, 1, 1, 1))
    for precision in ("bf16", "fp32"):
        b.kernel("mm", flops=3000, nbytes=8, precision=precision, category=MATMUL)
    b.kernel("add", nbytes=8, precision="bf16")
    costs = Costs(with_card(matmul=matmuls), Calibration(compute_efficiency=0.5))
    assert costs.kernels(b.program()).tolist() == pytest.approx([3000 / 250 + 2, 6000.0, 8e-30])


def test_one_share_of_products_takes_the_place_of_the_cards() -> None:
    """In its precision, for attention too where nothing is known of that."""
    card = with_card(matmul={"bf16": {"share": figure(0.5)}}, compute_efficiency=figure(0.25))
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("mm", flops=1000, nbytes=8, precision="bf16", category=MATMUL)
    b.kernel("flash", flops=1000, precision="bf16", category=ATTENTION)
    b.kernel("mm", flops=1, category=MATMUL)
    assert Costs(card, Calibration()).kernels(b.program()).tolist() == [2, 2, 4]


def test_a_step_keeps_a_part_of_the_rates_of_calls_alone() -> None:
    """A grouped matmul takes longer by it as a whole, operands too; attention by that of its direction."""
    grouped = {"share": figure(0.5), "bandwidth_bytes_per_s": figure(4.0), "sustained": figure(0.8)}
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("te_grouped_mm", flops=3000, nbytes=8, precision="bf16", category=MATMUL)
    costs = Costs(with_card(grouped_matmul={"bf16": grouped}), Calibration())
    assert costs.kernels(b.program()).tolist() == pytest.approx([(3000 / 500 + 2) / 0.8])
    rates = [
        rate(100.0, 4.0, direction="forward", sustained=figure(0.8)),
        rate(50.0, 4.0, direction="backward"),
    ]
    on = with_card(attention={"default": "flash_attention_2", "kernels": {"flash_attention_2": rates}})
    assert attention_seconds(on, "flash", 4, 4, True) == pytest.approx(
        [10 * 8 * 4 / 50 / 0.8, 10 * 8 * 10 / 25]
    )


def test_attention_by_direction_and_length() -> None:
    """Causal, 4 positions are half of the limit: 4 (4 + 1) / 2 pairs of 8 features, 2 matmuls forward and 5
    backward of 2 FLOPs each."""
    on = with_card(attention=ATTENTION_RATES)
    forward, backward = attention_seconds(on, "flash", 4, 4, True)
    assert (forward, backward) == (10 * 8 * 4 / 50, 10 * 8 * 10 / 25)
    forward, backward = attention_seconds(on, "flash", 12, 12, True)
    assert (forward, backward) == pytest.approx((78 * 8 * 4 / 75, 78 * 8 * 10 / 37.5))


def test_attention_without_a_mask_and_of_another_head_size() -> None:
    """A backward without a mask has no rate of its own: that of the same direction counts, at the shorter of
    queries and keys; a head of 3 features is nearest to one of 2, and both run as one of 32."""
    on = with_card(attention=ATTENTION_RATES)
    assert attention_seconds(on, "flash", 4, 6, False) == [24 * 8 * 4 / 200, 24 * 8 * 10 / 25]
    assert attention_seconds(on, "flash", 6, 4, False) == [24 * 8 * 4 / 200, 24 * 8 * 10 / 25]
    assert attention_seconds(on, "flash", 4, 4, True, size=3) == pytest.approx(
        [10 * 3 * 4 / (25 * 3 / 2), 10 * 3 * 10 / (70 * 3 / 2)]
    )


def test_a_kernel_has_rates_of_its_own_or_those_of_all_attention() -> None:
    on = with_card(attention=ATTENTION_RATES, attention_efficiency=figure(0.5))
    assert attention_seconds(on, "flash_attention_1", 4, 4, True) == [320 / 10, 800 / 10]
    assert attention_seconds(on, "flash_attention_4", 4, 4, True) == [320 / 500, 800 / 500]
    assert attention_seconds(on, "flash", 4, 4, True, dtype=torch.float32) == [320 / 0.5, 800 / 0.5]


def test_the_models_option_names_the_kernel() -> None:
    """Which changes the time of a step, and what FlashAttention-2 holds inside its backward."""
    made = {}
    for kernel in ("flash", "flash_attention_2", "flash_attention_1"):
        cell = Cell(
            model="causal-transformer-tiny",
            strategy="ulysses",
            sizes={"sp": 2},
            batch=2,
            seq_len=16,
            precision="bf16",
            model_options={"attention": kernel},
        )
        traced = virtual.trace_classes(cell, events=True)
        found = traced.simulator(with_card(attention=ATTENTION_RATES))()
        made[kernel] = (traced.traces[0].measurement(None).peak_memory_bytes, found.step_time_s)
    assert made["flash"][0] < made["flash_attention_2"][0]
    assert made["flash"][1] == made["flash_attention_2"][1]
    assert made["flash_attention_1"][0] == made["flash"][0]
    assert made["flash_attention_1"][1] > made["flash"][1]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (
            {"default": "triton", "kernels": {"flash_attention_1": [rate(1.0)]}},
            "default 'triton' has no rates",
        ),
        ({"default": "flash_attention_9", "kernels": {}}, "Input should be 'flash_attention_1'"),
        ({"default": "triton", "kernels": {"triton": [rate(-1.0)]}}, "greater than 0"),
        (
            {"default": "triton", "kernels": {"triton": [{**rate(1.0), "mask": "none"}]}},
            "'causal' or 'whole'",
        ),
    ],
)
def test_wrong_attention_rates_are_refused(attention: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_card(attention=attention)


def test_operators_take_what_was_measured_of_them() -> None:
    times = {"value": [[100.0, 5.0], [200.0, 7.0]], "source": "made up"}
    on = changed(cluster(memory=10), "device.operators", {"gelu": times})
    b = ProgramBuilder((1, 1, 1, 1))
    for nbytes in (10, 150, 400):
        b.kernel("gelu", nbytes=nbytes)
    b.kernel("other", nbytes=400)
    # as the smallest, on the line between, twice the largest; the other by its bytes
    assert Costs(on, Calibration()).kernels(b.program()).tolist() == [5.0, 6.0, 14.0, 40.0]


@pytest.mark.parametrize("times", [[], [[1.0]], [[2.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 2.0]]])
def test_times_of_operators_are_pairs_in_order(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="by ascending bytes"):
        changed(cluster(), "device.operators", {"gelu": {"value": times, "source": "made up"}})


@pytest.mark.parametrize(
    ("size", "runs_as"), [(64, 64), (72, 96), (80, 96), (128, 128), (129, 160), (300, 300)]
)
def test_a_head_size_runs_as_the_next_that_is_compiled(size: int, runs_as: int) -> None:
    assert grid.run_as(size) == runs_as


def test_only_padding_that_the_measured_head_lacks_costs() -> None:
    assert grid.head_share(72, 128) == 0.75
    assert grid.head_share(72, 72) == grid.head_share(64, 128) == 1.0
    assert grid.head_share(128, 72) == pytest.approx(4 / 3)


def test_backward_has_a_block_for_each_128_keys_and_head() -> None:
    # a text of 120 tokens, 16 heads: 16 blocks, each of which computes 128 keys
    assert grid.backward_share(16, 120, 72, 132) == pytest.approx(16 / 132 * 120 / 128)
    assert grid.backward_share(16, 8 * 128, 72, 132) == pytest.approx(128 / 132)
    assert grid.backward_share(16, 9 * 128, 72, 132) == 1.0
    assert grid.backward_share(1, 64, 256, 2) == 0.5  # of wide heads a block has 64 keys


def test_a_card_of_many_multiprocessors_is_idle_in_a_small_backward_alone() -> None:
    idle, full = (with_card(attention=ATTENTION_RATES, multiprocessors=figure(n)) for n in (1000, 1))
    forward, backward = attention_seconds(idle, "flash", 128, 128, True)
    forward_of_full, backward_of_full = attention_seconds(full, "flash", 128, 128, True)
    assert forward == forward_of_full
    assert backward == pytest.approx(1000 * backward_of_full)


def test_other_kernels_are_not_of_that_design() -> None:
    idle, full = (with_card(attention=ATTENTION_RATES, multiprocessors=figure(n)) for n in (1000, 1))
    of_idle = attention_seconds(idle, "flash_attention_1", 128, 128, True)
    assert of_idle == attention_seconds(full, "flash_attention_1", 128, 128, True)


def test_one_efficiency_is_of_attention_too() -> None:
    card = with_card(attention=ATTENTION_RATES)
    whole = attention_seconds(card, "flash", 128, 128, True)
    halved = attention_seconds(card, "flash", 128, 128, True, calibration=Calibration(efficiency=0.5))
    assert halved == pytest.approx([2 * seconds for seconds in whole])
