"""Gathered keys and values: bytes beside a ring's, memory, within other strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.engines import virtual
from spbench.bench.engines.plan import rank_classes
from spbench.bench.engines.virtual import VirtualEngine
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.ring_attention import RingAttention
from tests.bench.verification.attention_model import AttentionModel, formula


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


@pytest.mark.parametrize(
    ("placement", "gradients"),
    [*((placement, "reduce_scatter") for placement in PLACEMENTS), ("contiguous", "ring")],
)
@pytest.mark.parametrize("n", [2, 4, pytest.param(3, marks=pytest.mark.slow)])
def test_no_peak_is_larger_than_those_of_the_ranks_that_are_traced(
    n: int, placement: str, gradients: str
) -> None:
    asked = cell(
        "all_gather_kv",
        {"sp": n},
        seq_len=768,
        precision="bf16",
        model_options={"vocabulary": 16},
        strategy_options={"placement": placement, "gradients": gradients},
    )
    peaks = [virtual.trace(asked, rank).memory.peak().nbytes for rank in range(n)]
    assert max(peaks) == max(peaks[each.first] for each in rank_classes(asked))


def test_gradients_round_a_ring_leave_half_a_block_out_of_the_peak() -> None:
    """Placed zigzag, the last rank, which is traced, has gradients of half of the keys of each other at a
    time, and the others have those of all keys of some."""
    asked = cell(
        "all_gather_kv",
        {"sp": 4},
        seq_len=768,
        precision="bf16",
        model_options={"vocabulary": 16},
        strategy_options={"placement": "zigzag", "gradients": "ring"},
    )
    peaks = [virtual.trace(asked, rank).memory.peak().nbytes for rank in range(4)]
    half_a_block = 4 * (768 // 4) * 48 * 2  # of k and v in bfloat16
    assert max(peaks) - half_a_block <= max(peaks[each.first] for each in rank_classes(asked)) <= max(peaks)


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
