"""Ring Attention and gathered keys and values: values and gradients on real ranks, bytes on all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.engines.virtual import fake_mesh
from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.placements import PLACEMENTS, PlacedChunks
from spbench.impls.strategies.ring_attention import RingAttention
from tests.bench.verification.attention_model import AttentionModel, formula, metered


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


DTYPES = [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float64, torch.float32))]


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
    for dtype, seq_len in (("fp64", 24), ("fp64", 48), ("fp64", 2 * n), ("fp32", 24), ("bf16", 24)):
        row = verify_case(pool, Case(strategy, model, "attention", dtype, 3, seq_len, 0, options), n)
        assert row.status == "green", row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("strategy", "model", "placement"), [*cases()])
@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 8, 64))])
def test_bytes_are_those_of_the_formula(
    pool: RankPool,
    n: int,
    strategy: type[PlacedChunks],
    model: AttentionModel,
    placement: str,
    dtype: torch.dtype,
) -> None:
    case: Any = strategy, {"placement": placement}, model, dtype, 2 * n
    expected = formula(n, *case)
    for rank in (0, n - 1):
        with fake_mesh({"sp": n}, rank) as mesh, FakeTensorMode():
            assert metered(mesh, *case) == expected
    if n <= 4:
        assert pool.run({"sp": n}, metered, *case) == [expected] * n
