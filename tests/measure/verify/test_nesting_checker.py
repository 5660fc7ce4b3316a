"""Strategies around each other agree with the single device; the checker rejects what goes wrong there.

The checker rejects the planted faults of experts, and names a tensor that each spoils.
"""

import re
from dataclasses import asdict, replace

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import VerifyRow, verify_case, verify_cases
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.nesting import nesting, pairs
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.verify import expert_faults as faults
from tests.measure.verify.assertions import assert_green, assert_red
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
        rows = list(verify_cases(PAIRS, None, [4, 6], pool=pool))
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


TINY = asdict(model_preset("moe-tiny", {"layers": 2, "heads": 4, "aux_loss": "batch", "aux_weight": 0.1}))  # type: ignore[call-overload]
EXPERTS, ROUTER = "gradient of blocks.1.mlp.experts.", "gradient of blocks.1.mlp.router."

#: fault, strategy, folds, how the name of the worst tensor may begin
FAULTS: list[tuple[type[CausalTransformerModel], type[Strategy], dict[str, int], tuple[str, ...]]] = [
    (faults.ExpertGradientsTimesEp, Ulysses, {"ep": 2}, (EXPERTS, "gradient of blocks.0.mlp.experts.")),
    (faults.ExpertGradientsOverAllRanks, Ulysses, {"ep": 2}, ("gradient of blocks",)),
    (faults.RouterGradientNotSummed, RingAttention, {"ep": 2}, ("gradient of blocks",)),
    (faults.CountsOfOwnTokens, RingAttention, {"ep": 2}, ("gradient of",)),
    (faults.AuxiliaryLossOverWrongGroup, MegatronSP, {"ep": 2}, ("gradient of",)),
    (faults.TokensDroppedInSilence, Ulysses, {"ep": 2}, ("output", "gradient of")),
]


def case(cls: type[CausalTransformerModel], strategy: type[Strategy], folds: dict[str, int]) -> Case:
    return Case(strategy, cls(**TINY), "model", folds=folds)


@pytest.mark.parametrize(
    ("fault", "strategy", "folds", "tensors"), FAULTS, ids=[f[0].__name__ for f in FAULTS]
)
def test_planted_fault_is_red(
    pool: RankPool,
    fault: type[CausalTransformerModel],
    strategy: type[Strategy],
    folds: dict[str, int],
    tensors: tuple[str, ...],
) -> None:
    row = assert_red(pool, case(fault, strategy, folds), 2, *tensors)
    if fault is faults.ExpertGradientsTimesEp:
        assert row.factor == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("strategy", "ranks", "folds"),
    [(Ulysses, 2, {"ep": 2}), *(slow(*each) for each in ((RingAttention, 4, {"ep": 2, "etp": 2}),))],
)
def test_without_a_fault_it_is_green(
    pool: RankPool, strategy: type[Strategy], ranks: int, folds: dict[str, int]
) -> None:
    assert_green(pool, case(CausalTransformerModel, strategy, folds), ranks)


def test_in_half_precision_choices_are_those_of_the_reference(pool: RankPool) -> None:
    """There a token between two experts goes to either; what routers choose is proven in float64."""
    tossed = case(faults.OtherChoices, Ulysses, {"ep": 2})
    assert verify_case(pool, tossed, 2).status == "RED"
    assert verify_case(pool, replace(tossed, dtype="bf16"), 2).status == "green"


@pytest.mark.parametrize(
    ("strategy", "model", "folds", "reason"),
    [
        ("tensor_parallel", "moe-tiny", {}, "ranks along tp of tensor_parallel hold the same tokens"),
        ("ulysses", "moe-tiny", {"ep": 5}, "12 experts are not divisible by ep 5; use ep 4 or 6"),
        (
            "ulysses",
            "moe-tiny",
            {"etp": 5},
            "24 features of an expert are not divisible by etp 5; use etp 4 or 6",
        ),
        ("ulysses", "causal-transformer-tiny", {"ep": 2}, "has no experts, .*; leave ep and etp out"),
    ],
)
def test_sizes_that_cannot_be(
    pool: RankPool, strategy: str, model: str, folds: dict[str, int], reason: str
) -> None:
    asked = Case(strategy_class(strategy), model_preset(model), "model", seq_len=20, folds=folds)
    row = verify_case(pool, asked, max([2, *folds.values()]))
    assert row.status == "unsupported"
    assert re.search(reason, row.reason), row.reason
