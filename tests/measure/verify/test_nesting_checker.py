"""Strategies around each other agree with the single device; the checker rejects what goes wrong there."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import VerifyRow, verify, verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.nesting import nesting, pairs
from tests.measure.verify.planting import assert_green
from tests.slow import slow

BERT, DECODER = model_preset("bert-tiny"), model_preset("causal-transformer-tiny")
LINEAR = model_preset("tnl-tiny", {"attention_norm": "head"})
#: of these models each pair is tried on the first that it can run
MODELS = ("bert-tiny", "causal-transformer-tiny", "linear-llama3-tiny", "st-dit-tiny", "hybrid-tiny")

PAIRS = [pair.name for pair in pairs()]


def runnable(pair: str, pool: RankPool, dtype: str = "fp64") -> VerifyRow:
    """The row of the first of MODELS that a pair can run on 2 x 2 ranks; of the last if there is none."""
    strategy = nesting(pair)
    for model in MODELS:
        row = verify_case(pool, Case(strategy, model_preset(model), "model", dtype), strategy.meshes(4)[0])
        if row.status != "unsupported":
            break
    return row


@pytest.mark.covering(1)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair(pool: RankPool, pair: str) -> None:
    row = runnable(pair, pool)
    if pair in ("megatron_sp+dsp", "odysseus+dsp", "ulysses+dsp"):
        assert row.status == "unsupported"
        assert "stays cut along one dim" in row.reason
    elif pair in ("upipe+ulysses", "upipe+fpdt", "upipe+lasp2h"):
        # a round has one head, which is not split again (tests of chunks have more), and no recurrence
        assert row.status == "unsupported"
    else:
        assert row.status == "green", row


@pytest.mark.slow
def test_every_pair_on_every_tiny_model_and_variant() -> None:
    with RankPool(6) as pool:
        rows = list(verify(PAIRS, None, [4, 6], pool=pool))
    assert not [asdict(row) for row in rows if row.status == "RED"]
    assert {row.mesh for row in rows if row.status == "green"} >= {"tp2xsp2", "tp2xsp3", "tp3xsp2", "sp2xcp3"}


# -- options, and three around each other ------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("outer", "placement"),
    [
        *(("tensor_parallel", "zigzag"), ("megatron_sp", "striped"), ("ulysses", "zigzag")),
        *(slow("tensor_parallel", "striped"), slow("megatron_sp", "zigzag"), slow("ulysses", "striped")),
    ],
)
def test_placements_of_a_ring_within(pool: RankPool, outer: str, placement: str) -> None:
    strategy = nesting(f"{outer}+ring_attention")
    case = Case(strategy, DECODER, "model", options={"placement": placement})
    assert_green(pool, case, strategy.meshes(4)[0])


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
        assert_green(pool, Case(strategy, model, "model"), {"tp": 2, "sp": 2, "cp": 2})
