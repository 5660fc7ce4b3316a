"""The checker rejects the planted faults of experts, and names a tensor that each spoils."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.verify import expert_faults as faults
from tests.measure.verify.planting import assert_green, assert_red
from tests.slow import slow

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
