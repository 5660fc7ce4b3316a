"""DeepSpeed-Ulysses: values, gradients and bytes on real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.strategies.base import Unsupported
from spbench.impls.strategies.ulysses import Ulysses
from tests.bench.verification.assertions import assert_green
from tests.bench.verification.attention_model import AttentionModel, formula

MODELS = [
    AttentionModel("causal_attention"),
    *(AttentionModel("causal_attention", kv_heads=kv_heads) for kv_heads in (4, 2, 1)),
    AttentionModel("linear_attention"),
    AttentionModel("linear_attention", way="left_product"),
    AttentionModel("linear_attention", decay=False, way="quadratic"),
    AttentionModel("attention"),
    AttentionModel("attention", masked=True),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)), 4])
def test_all_three_gradients(pool: RankPool, n: int, model: AttentionModel) -> None:
    for dtype, seq_len in (("fp64", 24), ("bf16", 24)):
        assert_green(pool, Case(Ulysses, model, "attention", dtype, 3, seq_len), n)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("heads", [2, 6])
def test_heads_that_ranks_do_not_divide_are_padded(pool: RankPool, heads: int, model: AttentionModel) -> None:
    grouped = None if model.kv_heads is None else heads // 2
    model = replace(model, heads=heads, kv_heads=grouped)
    assert_green(pool, Case(Ulysses, model, "attention", options={"pad_heads": True}), 4)
    refused = verify_case(pool, Case(Ulysses, model, "attention"), 4)
    assert (refused.status, "option pad_heads" in refused.reason) == ("unsupported", True)


@pytest.mark.parametrize(("n", "nearest"), [(5, "4 or 6"), (24, "12"), (7, "6 or 12")])
def test_nearest_sizes_are_told(n: int, nearest: str) -> None:
    with pytest.raises(Unsupported, match=rf"12 attention heads .* {n} ranks; use {nearest}, or"):
        Ulysses.planned(n).check(AttentionModel().sites(1, 5 * 7 * 24))


def test_masks_of_own_queries_are_refused() -> None:
    site, _ = AttentionModel("attention").sites(1, 24)
    rows = type(site)(site.kind, 1, {**site.dims, "mask_rows": 24})
    with pytest.raises(Unsupported, match="same for all queries; use mask_shape keys"):
        Ulysses.planned(2).check([rows])


@pytest.mark.parametrize("n", [2, 4, 12])
def test_bytes_are_those_of_the_paper(n: int) -> None:
    """Section 3.2: 4 messages of M/N forward, M = B L Z A elements, of which (N-1)/N leave the rank."""
    sent = formula(n, Ulysses, {}, AttentionModel(), torch.float32, 24)
    one_way = 4 * (3 * 24 * 12 * 4) * 4 * (n - 1) / n**2
    assert sent == {("forward", "all_to_all"): one_way, ("backward", "all_to_all"): one_way}


@pytest.mark.parametrize(
    ("n", "kv_heads", "sent"),
    [(2, 4, 4), (4, 4, 4), (3, 4, 12), (4, 2, 4), (12, 4, 12), (3, 1, 3), (4, 1, 4)],
)
def test_keys_are_sent_with_as_few_heads_as_ranks_allow(n: int, kv_heads: int, sent: int) -> None:
    """Their own where N divides them, else the least common multiple; q and the output with all 12."""
    payload = 3 * (24 // n) * 4 * 4
    entries = Ulysses.planned(n).communication(AttentionModel(kv_heads=kv_heads).sites(3, 24), 4)
    forward = {t.purpose: (t.count, t.payload_bytes // payload) for t in entries if t.phase == "forward"}
    assert forward == {"q and the output": (2, 12), "k and v": (2, sent)}
