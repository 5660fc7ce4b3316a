"""Ring Attention and gathered keys and values: values, gradients and bytes on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.oracle import Case
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.placements import PLACEMENTS, PlacedChunks
from spbench.impls.strategies.ring_attention import RingAttention
from tests.bench.verification.assertions import assert_green
from tests.bench.verification.attention_model import AttentionModel


def cases() -> Iterator[Any]:
    """Strategies, what they attend to, and placements."""
    for strategy in (RingAttention, AllGatherKV):
        of_strategy = [
            *((AttentionModel("causal_attention", rotary=True), placement) for placement in PLACEMENTS),
            *((AttentionModel("causal_attention", kv_heads=4), placement) for placement in PLACEMENTS),
            (AttentionModel("causal_attention", kv_heads=1), "contiguous"),
            (AttentionModel("attention"), "contiguous"),
            (AttentionModel("attention"), "striped"),
            (AttentionModel("full_attention"), "contiguous"),
        ]
        if "linear_attention" in strategy.meets:
            of_strategy.append((AttentionModel("linear_attention"), "contiguous"))
            of_strategy.append((AttentionModel("linear_attention", decay=False), "contiguous"))
        for model, placement in of_strategy:
            groups = "" if model.kv_heads is None else f"-{model.kv_heads} heads of keys"
            decay = "" if model.decay else "-no decay"
            name = f"{strategy.name}-{model.kind}{groups}{decay}-{placement}"
            yield pytest.param(strategy, model, placement, id=name)


def of_ranks() -> Iterator[Any]:
    """All cases on 1 to 4 ranks; in every run on 4, and on 3 the first ones, in all placements."""
    for n in range(1, 5):
        for number, case in enumerate(cases()):
            always = n == 4 or (n == 3 and number < len(PLACEMENTS))
            marks = () if always else pytest.mark.slow
            yield pytest.param(n, *case.values, id=f"{n}-{case.id}", marks=marks)


@pytest.mark.parametrize(("n", "strategy", "model", "placement"), [*of_ranks()])
def test_all_three_gradients(
    pool: RankPool, n: int, strategy: type[PlacedChunks], model: AttentionModel, placement: str
) -> None:
    options = {"placement": placement}
    # 2 n: a position or two a rank
    for dtype, seq_len in (("fp64", 24), ("fp64", 2 * n), ("bf16", 24)):
        assert_green(pool, Case(strategy, model, "attention", dtype, 3, seq_len, 0, options), n)
