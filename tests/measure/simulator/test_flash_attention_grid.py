"""FlashAttention-2 on calls unlike those that were measured."""

from __future__ import annotations

import pytest

from spbench.bench.measure.clusters.cluster import Calibration
from spbench.bench.measure.simulator import flash_attention_grid as grid
from tests.measure.simulator.test_card_rates import ATTENTION_RATES, attention_seconds, figure, with_card


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
