"""Gathered keys and values: values and gradients on real ranks; bytes, memory; within other strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.cell import Cell
from spbench.bench.engines import virtual
from spbench.bench.engines.plan import rank_classes
from spbench.bench.engines.rank_pool import RankPool
from spbench.bench.engines.virtual import VirtualEngine, fake_mesh
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.ring_attention import RingAttention
from tests.bench.verification.attention_model import AttentionModel, formula, metered

CASES: list[tuple[AttentionModel, str]] = [
    *((AttentionModel("causal_attention", rotary=True), placement) for placement in PLACEMENTS),
    (AttentionModel("attention"), "contiguous"),
    (AttentionModel("attention"), "striped"),
    (AttentionModel("full_attention"), "contiguous"),
]

DTYPES = [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float64, torch.float32))]


@pytest.mark.parametrize(("model", "placement"), CASES, ids=str)
@pytest.mark.parametrize("n", [3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_all_three_gradients(pool: RankPool, n: int, model: AttentionModel, placement: str) -> None:
    options = {"placement": placement}
    # 2 n: a position or two a rank
    for dtype, seq_len in (("fp64", 24), ("fp64", 48), ("fp64", 2 * n), ("fp32", 24), ("bf16", 24)):
        row = verify_case(pool, Case(AllGatherKV, model, "attention", dtype, 3, seq_len, 0, options), n)
        assert row.status == "green", row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model", "placement"), CASES, ids=str)
@pytest.mark.parametrize("n", [3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 64))])
def test_bytes_are_those_of_the_formula(
    pool: RankPool, n: int, model: AttentionModel, placement: str, dtype: torch.dtype
) -> None:
    case: Any = AllGatherKV, {"placement": placement}, model, dtype, 2 * n
    expected = formula(n, *case)
    for rank in (0, n - 1):
        with fake_mesh({"sp": n}, rank) as mesh, FakeTensorMode():
            assert metered(mesh, *case) == expected
    if n <= 4:
        assert pool.run({"sp": n}, metered, *case) == [expected] * n


@pytest.mark.parametrize("n", [2, 8])
def test_as_many_bytes_as_a_ring_sends(n: int) -> None:
    """Keys and values take N - 1 hops either way; the sums of their gradients take N - 1 here, and in a ring
    one more, to come home."""
    case: Any = {}, AttentionModel(), torch.bfloat16, 2 * n
    gathers, travels = formula(n, AllGatherKV, *case), formula(n, RingAttention, *case)
    assert gathers["forward", "all_gather"] == travels["forward", "send"]
    assert gathers["backward", "all_gather"] == gathers["forward", "all_gather"]
    sums = travels["backward", "send"] - travels["forward", "send"]
    assert gathers["backward", "reduce_scatter"] * n == sums * (n - 1)


def cell(strategy: str, sizes: dict[str, int], **changes: Any) -> Cell:
    settings = {
        "model": "causal-transformer-tiny",
        "strategy": strategy,
        "sizes": sizes,
        "batch": 4,
        "seq_len": 24,
    }
    return Cell.model_validate(settings | changes)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("n", [2, 4, pytest.param(3, marks=pytest.mark.slow)])
def test_no_peak_is_larger_than_those_of_the_ranks_that_are_traced(n: int, placement: str) -> None:
    asked = cell(
        "all_gather_kv",
        {"sp": n},
        seq_len=768,
        precision="bf16",
        model_options={"vocabulary": 16},
        strategy_options={"placement": placement},
    )
    peaks = [virtual.trace(asked, rank).memory.peak().nbytes for rank in range(n)]
    assert max(peaks) == max(peaks[each.first] for each in rank_classes(asked))


@pytest.mark.parametrize(
    ("model", "placement"),
    [
        ("causal-transformer-tiny", "zigzag"),
        ("st-dit-tiny", "contiguous"),
        *(
            pytest.param("causal-transformer-tiny", placement, marks=pytest.mark.slow)
            for placement in ("contiguous", "striped")
        ),
    ],
)
@pytest.mark.parametrize("around", ["tensor_parallel", "megatron_sp", "ulysses"])
def test_within_another_strategy(around: str, model: str, placement: str) -> None:
    axes = ("sp", "cp") if around == "ulysses" else ("tp", "sp")
    asked = cell(
        f"{around}+all_gather_kv",
        {**dict.fromkeys(axes, 2), "dp": 2},
        model=model,
        precision="bf16",
        model_options={"checkpointing": True},
        strategy_options={"placement": placement},
    )
    measured = VirtualEngine().measure(asked)
    assert measured.formula_difference == []
    assert {*axes} <= {row["axis"] for row in measured.communication}
