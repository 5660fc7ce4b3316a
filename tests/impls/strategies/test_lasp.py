"""LASP and LASP-2: values, gradients and bytes on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.engines.virtual import fake_mesh
from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from tests.bench.verification import state_faults
from tests.bench.verification.assertions import assert_green
from tests.bench.verification.attention_model import AttentionModel, metered

WAYS: list[tuple[type[Strategy], dict[str, Any]]] = [
    (Lasp, {}),
    (Lasp, {"kernel_fusion": False}),
    (Lasp, {"state_caching": False}),
    (Lasp, {"barrier": True}),
    (Lasp2, {}),
]
MODELS = [
    AttentionModel("linear_attention", heads=3),
    AttentionModel("linear_attention", heads=2, decay=False),
]


@pytest.mark.parametrize(("cls", "options"), WAYS, ids=str)
@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)), 4])
def test_all_three_gradients(pool: RankPool, n: int, cls: type[Strategy], options: dict[str, Any]) -> None:
    for model in MODELS:
        for dtype, seq_len in (("fp64", 24), ("bf16", 24)):
            assert_green(pool, Case(cls, model, "attention", dtype, 3, seq_len, options=options), n)


@pytest.mark.parametrize("cls", [Lasp, Lasp2])
def test_chunks_of_several_blocks_and_a_rest(pool: RankPool, cls: type[Strategy]) -> None:
    assert_green(pool, Case(cls, MODELS[0], "attention", "fp64", 1, 3 * 600), 3)


@pytest.mark.parametrize("fault", state_faults.ALL)
def test_faults_are_found(pool: RankPool, fault: type[Strategy]) -> None:
    # one position of weak decay is less than bf16 can tell
    for dtype in ("fp64",) if fault is state_faults.ChunkDecayOffByOne else ("fp64", "bf16"):
        row = verify_case(pool, Case(fault, MODELS[0], "attention", dtype, 3, 24), 4)
        assert row.status == "RED", row


def test_uneven_chunks_are_refused() -> None:
    with pytest.raises(
        Unsupported, match="25 is not divisible by 4 ranks; use a sequence length of 24 or 28"
    ):
        Lasp.planned(4).check(MODELS[0].sites(1, 25))


def test_other_attention_is_refused() -> None:
    with pytest.raises(Unsupported, match="lasp has no causal softmax attention"):
        Lasp.planned(4).check(AttentionModel("causal_attention").sites(1, 24))


@pytest.mark.parametrize("length", [2048, 65536, 4194304])
def test_bytes_do_not_depend_on_the_length(length: int) -> None:
    """Table 1: B d^2 / h elements a layer forward, d = Z A, here as float32; of a rank in the middle."""
    model = AttentionModel("linear_attention", heads=16, head_size=128, key_size=128)
    with fake_mesh({"sp": 64}, 1) as mesh, FakeTensorMode():
        sent = metered(mesh, Lasp, {}, model, torch.bfloat16, length, batch=1)
    state = 2048**2 // 16 * 4
    assert sent == {("forward", "send"): state, ("backward", "send"): state}


def test_every_rank_has_one_role() -> None:
    for n in range(1, 6):
        assert sorted(rank for role in Lasp.roles("sp", n) for rank in role) == list(range(n))
