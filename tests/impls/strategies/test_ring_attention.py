"""Ring Attention: values and gradients on real ranks, bytes on real and virtual ones, misuse of the ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes
from spbench.bench.engines import virtual
from spbench.bench.engines.rank_pool import RankPool
from spbench.bench.engines.virtual import fake_mesh
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.collectives import Ring
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.ring_attention import RingAttention
from tests.bench.verification.attention_model import AttentionModel, formula, metered

CASES: list[tuple[AttentionModel, str]] = [
    *((AttentionModel("causal_attention"), placement) for placement in PLACEMENTS),
    *((AttentionModel("causal_attention", kv_heads=4), placement) for placement in PLACEMENTS),
    (AttentionModel("causal_attention", kv_heads=1), "contiguous"),
    (AttentionModel("attention"), "contiguous"),
    (AttentionModel("attention"), "striped"),
    (AttentionModel("linear_attention"), "contiguous"),
    (AttentionModel("linear_attention", decay=False), "contiguous"),
]

DTYPES = [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float64, torch.float32))]


@pytest.mark.parametrize(("model", "placement"), CASES, ids=str)
@pytest.mark.parametrize("n", [3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_all_three_gradients(pool: RankPool, n: int, model: AttentionModel, placement: str) -> None:
    options = {"placement": placement}
    # 2 n: a position or two a rank
    for dtype, seq_len in (("fp64", 24), ("fp64", 48), ("fp64", 2 * n), ("fp32", 24), ("bf16", 24)):
        row = verify_case(pool, Case(RingAttention, model, "attention", dtype, 3, seq_len, 0, options), n)
        assert row.status == "green", row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model", "placement"), CASES, ids=str)
@pytest.mark.parametrize("n", [3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 64))])
def test_bytes_are_those_of_the_formula(
    pool: RankPool, n: int, model: AttentionModel, placement: str, dtype: torch.dtype
) -> None:
    case: Any = RingAttention, {"placement": placement}, model, dtype, 2 * n
    expected = formula(n, *case)
    for rank in (0, n - 1):
        with fake_mesh({"sp": n}, rank) as mesh, FakeTensorMode():
            assert metered(mesh, *case) == expected
    if n <= 4:
        assert pool.run({"sp": n}, metered, *case) == [expected] * n


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
    ring.start(x)
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
