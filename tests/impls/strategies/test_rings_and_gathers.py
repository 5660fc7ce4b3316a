"""Ring Attention and gathered keys and values: bytes, memory, within other strategies, misuse of a ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.collectives import Ring
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.place import Place
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.ring_attention import RingAttention
from tests.measure.verify.attention_model import AttentionModel, formula
from tests.slow import slow


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
    settings = {"model": "causal-transformer-tiny", "strategy": strategy, "sizes": sizes, "batch": 4}
    return Cell.model_validate(settings | {"seq_len": 24} | changes)


def peaks_of_ranks(n: int, strategy: str, **options: str) -> tuple[list[int], int]:
    """Peak bytes of every rank, and the largest of the ranks that are traced for their classes."""
    of: Any = {"precision": "bf16", "model_options": {"vocabulary": 16}, "strategy_options": options}
    asked = cell(strategy, {"sp": n}, seq_len=768, **of)
    peaks = [tracing.trace(asked, rank).memory.peak().nbytes for rank in range(n)]
    return peaks, max(peaks[each.first] for each in rank_classes(asked))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [*({"placement": p} for p in PLACEMENTS), {"gradients": "ring"}], ids=str)
@pytest.mark.parametrize("n", [4, slow(3)])
def test_no_peak_is_larger_than_those_of_the_ranks_that_are_traced(n: int, options: dict[str, str]) -> None:
    peaks, traced = peaks_of_ranks(n, "all_gather_kv", **options)
    assert max(peaks) == traced


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_rank_of_a_ring_holds_more_than_the_last(placement: str) -> None:
    """Which stands for all: one that skips blocks must not keep the gradients of the block before."""
    of: Any = {"batch": 2, "seq_len": 4096, "precision": "bf16", "strategy_options": {"placement": placement}}
    asked = cell("ring_attention", {"sp": 4}, **of)
    peaks = [tracing.trace(asked, rank).memory.peak().nbytes for rank in range(4)]
    assert peaks == [peaks[-1]] * 4


def test_gradients_round_a_ring_leave_half_a_block_out_of_the_peak() -> None:
    """The last rank, which is traced, holds gradients of half of the keys of each other rank."""
    peaks, traced = peaks_of_ranks(4, "all_gather_kv", placement="zigzag", gradients="ring")
    half_a_block = 4 * (768 // 4) * 48 * 2  # of k and v in bfloat16
    assert max(peaks) - half_a_block <= traced <= max(peaks)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("model", "placement"),
    [
        ("causal-transformer-tiny", "zigzag"),
        ("st-dit-tiny", "contiguous"),
        *(slow("causal-transformer-tiny", placement) for placement in ("contiguous", "striped")),
    ],
)
@pytest.mark.parametrize("around", ["tensor_parallel", "megatron_sp", "ulysses"])
def test_within_another_strategy(around: str, model: str, placement: str) -> None:
    axes = ("sp", "cp") if around == "ulysses" else ("tp", "sp")
    sizes = {**dict.fromkeys(axes, 2), "dp": 2}
    of: Any = {"model_options": {"checkpointing": True}, "strategy_options": {"placement": placement}}
    asked = cell(f"{around}+all_gather_kv", sizes, model=model, precision="bf16", **of)
    measured = VirtualEngine().measure(asked)
    assert measured.formula_difference == []
    assert {*axes} <= {row["axis"] for row in measured.communication}


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
    return strategy.linear_attention(one, one, mine, DecayMask()).item()


def test_linear_attention_adds_up_in_float32(pool: RankPool) -> None:
    """In bfloat16 three times 0.75 added to 256, whose next number is 258, would be lost."""
    assert pool.run({"sp": 4}, linear_attention_of_ones, [0.75, 0.75, 0.75, 256.0])[-1] == 258


def test_only_heads_of_keys_and_values_travel() -> None:
    """A third of them, a third of the bytes."""
    whole, third = (
        formula(3, RingAttention, {}, AttentionModel(kv_heads=n), torch.float32, 24) for n in (12, 4)
    )
    assert third == {key: sent / 3 for key, sent in whole.items()}
