"""Strategies around each other agree with the single device; the checker rejects what goes wrong there."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.cases import VerifyRow, verify, verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.models.model import Model, model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.nesting import Nesting, nesting, pairs
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ring_self_attention import RingSelfAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from tests.bench.verification import nesting_faults as faults

BERT, DECODER = model_preset("bert-tiny"), model_preset("causal-transformer-tiny")
LINEAR = model_preset("tnl-tiny", {"attention_norm": "head"})
#: of these models each pair is tried on the first that it can run
MODELS = ("bert-tiny", "causal-transformer-tiny", "linear-llama3-tiny", "st-dit-tiny")

PAIRS = [pair.name for pair in pairs()]


def runnable(pair: str, pool: RankPool, dtype: str = "fp64") -> VerifyRow:
    """The row of the first of MODELS that a pair can run on 2 x 2 ranks; of the last if there is none."""
    strategy = nesting(pair)
    for model in MODELS:
        row = verify_case(pool, Case(strategy, model_preset(model), "model", dtype), strategy.meshes(4)[0])
        if row.status != "unsupported":
            break
    return row


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair(pool: RankPool, pair: str) -> None:
    row = runnable(pair, pool)
    if pair in ("megatron_sp+dsp", "ulysses+dsp"):
        assert row.status == "unsupported"
        assert "stays cut along one dim" in row.reason
    else:
        assert row.status == "green", row


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_at_the_noise_of_its_precision(pool: RankPool, pair: str, dtype: str) -> None:
    assert runnable(pair, pool, dtype).status in ("green", "unsupported")


@pytest.mark.slow
def test_every_pair_on_every_tiny_model_and_variant() -> None:
    with RankPool(6) as pool:
        rows = list(verify(PAIRS, None, [4, 6], pool=pool))
    assert not [asdict(row) for row in rows if row.status == "RED"]
    assert {row.mesh for row in rows if row.status == "green"} >= {"tp2xsp2", "tp2xsp3", "tp3xsp2", "sp2xcp3"}


# -- options, and three around each other ------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["striped", "zigzag"])
@pytest.mark.parametrize("outer", ["tensor_parallel", "megatron_sp", "ulysses"])
def test_placements_of_a_ring_within(pool: RankPool, outer: str, placement: str) -> None:
    strategy = nesting(f"{outer}+ring_attention")
    case = Case(strategy, DECODER, "model", options={"placement": placement})
    row = verify_case(pool, case, strategy.meshes(4)[0])
    assert row.status == "green", row


@pytest.mark.parametrize("order", [("sp", "cp"), ("cp", "sp")], ids="-".join)
def test_ulysses_and_a_ring_in_both_orders_of_the_mesh(pool: RankPool, order: tuple[str, str]) -> None:
    case = Case(nesting("ulysses+ring_attention"), DECODER, "model", options={"placement": "zigzag"})
    row = verify_case(pool, case, dict.fromkeys(order, 2))
    assert row.status == "green", row
    assert row.mesh == "x".join(f"{axis}2" for axis in order)


def test_padded_heads_within_tensor_parallelism(pool: RankPool) -> None:
    model = model_preset("causal-transformer-tiny", {"heads": 6})
    case = Case(nesting("tensor_parallel+ulysses"), model, "model", options={"pad_heads": True})
    row = verify_case(pool, case, {"tp": 2, "sp": 2})  # 3 heads a rank
    assert row.status == "green", row


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["tensor_parallel", "megatron_sp"])
@pytest.mark.parametrize("inner", ["ring_attention", "ring_self_attention", "lasp", "lasp2"])
def test_three_around_each_other(outer: str, inner: str) -> None:
    model = {"ring_attention": DECODER, "ring_self_attention": BERT}.get(inner, LINEAR)
    strategy = nesting(f"{outer}+ulysses+{inner}")
    with RankPool(8) as pool:
        row = verify_case(pool, Case(strategy, model, "model"), {"tp": 2, "sp": 2, "cp": 2})
    assert row.status == "green", row


# -- planted faults ----------------------------------------------------------------------------------------

# the classes, options, the model and the part that show it, and how the name of the worst tensor may begin
FAULTS: list[tuple[tuple[type[Strategy], ...], dict[str, Any], Model, str, tuple[str, ...]]] = [
    ((faults.SumLacksTheSequenceAxis, RingSelfAttention), {}, BERT, "block", ("gradient of layer.",)),
    ((faults.SumHasTheTensorAxisToo, RingSelfAttention), {}, BERT, "block", ("gradient of layer.",)),
    ((faults.GatherWithoutTheSum, RingAttention), {}, DECODER, "block", ("gradient of",)),
    (
        (TensorParallel, faults.PositionsOfTheLocalChunk),
        {},
        DECODER,
        "attention",
        ("output y", "gradient of"),
    ),
    ((MegatronSP, faults.PositionsOfTheLocalChunk), {}, DECODER, "attention", ("output y", "gradient of")),
    ((faults.ChunksInTheOrderOfHeads, RingAttention), {}, DECODER, "attention", ("output y", "gradient of")),
    ((faults.NestedHeadsWithOneDecay, Lasp2), {}, LINEAR, "attention", ("output y", "gradient of")),
]


@pytest.mark.parametrize(
    ("classes", "options", "model", "part", "plausible"),
    FAULTS,
    ids=["+".join(cls.__name__ for cls in fault[0]) for fault in FAULTS],
)
def test_planted_fault_is_red(
    pool: RankPool,
    classes: tuple[type[Strategy], ...],
    options: dict[str, Any],
    model: Model,
    part: str,
    plausible: tuple[str, ...],
) -> None:
    strategy = Nesting(classes)
    row = verify_case(pool, Case(strategy, model, part, options=options), strategy.meshes(4)[0])
    assert row.status == "RED"
    assert row.tensor, row.reason  # wrong, not broken
    assert row.tensor.startswith(plausible), row


@pytest.mark.parametrize("outer", [TensorParallel, MegatronSP, Ulysses])
def test_a_loss_averaged_by_rank_is_red(pool: RankPool, outer: type[Strategy]) -> None:
    averaged = faults.LossAveragedByRank(
        layers=2, hidden=48, heads=12, vocabulary=96, vocabulary_multiple=1, dropout=0.0
    )
    strategy = Nesting((outer, RingSelfAttention))
    row = verify_case(pool, Case(strategy, averaged, "model"), strategy.meshes(4)[0])
    assert row.status == "RED"
    assert row.tensor, row.reason
