"""Ring Attention: what travels, what its ranks hold, misuse of the ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes
from spbench.bench.engines import virtual
from spbench.bench.ranks.rank_pool import RankPool
from spbench.impls.axes import Place
from spbench.impls.collectives import Ring
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.ring_attention import RingAttention
from tests.bench.verification.attention_model import AttentionModel, formula


def test_only_heads_of_keys_and_values_travel() -> None:
    """A third of them, a third of the bytes."""
    whole, third = (
        formula(3, RingAttention, {}, AttentionModel(kv_heads=n), torch.float32, 24) for n in (12, 4)
    )
    assert third == {key: sent / 3 for key, sent in whole.items()}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_rank_holds_more_than_the_last(placement: str) -> None:
    """Which stands for all: one that skips blocks must not keep the gradients of the block before."""
    cell = Cell(
        model="causal-transformer-tiny",
        strategy="ring_attention",
        sizes=Sizes(sp=4),
        batch=2,
        seq_len=4096,
        precision="bf16",
        strategy_options={"placement": placement},
    )
    peaks = [virtual.trace(cell, rank).memory.peak().nbytes for rank in range(4)]
    assert peaks == [peaks[-1]] * 4


def misuse(mesh: DeviceMesh) -> list[str]:
    ring, x = Ring(mesh.get_group("sp")), torch.zeros(3)
    said = []

    def fails(what: Any) -> None:
        with pytest.raises(RuntimeError) as raised:
            what()
        said.append(str(raised.value))

    fails(ring.finish)
    ring.start(x, torch.zeros(2))
    fails(lambda: ring.start(x))
    x.add_(1)
    fails(ring.finish)
    return said


def test_misuse_of_the_ring_raises(pool: RankPool) -> None:
    for said in pool.run({"sp": 2}, misuse):
        assert [s.split(";")[0] for s in said] == [
            "nothing is under way",
            "tensors are under way already",
            "a tensor was written to while it was being sent",
        ]


def linear_attention_of_ones(mesh: DeviceMesh, values: list[float]) -> float:
    strategy = RingAttention(Place.on(mesh))
    one, mine = (torch.tensor(x, dtype=torch.bfloat16).view(1, 1, 1, 1) for x in (1.0, values[strategy.rank]))
    return strategy.linear_attention(one, one, mine, None).item()


def test_linear_attention_adds_up_in_float32(pool: RankPool) -> None:
    """In bfloat16 three times 0.75 added to 256, whose next number is 258, would be lost."""
    assert pool.run({"sp": 4}, linear_attention_of_ones, [0.75, 0.75, 0.75, 256.0])[-1] == 258
