"""Models of fused libraries and a split vocabulary under Megatron-SP are right; faults are rejected."""

from __future__ import annotations

import pytest

from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.tensor_parallel import TensorParallel
from tests.bench.verification import library_faults as faults

IN_PLACE = {"library": "transformer-engine", "cross_entropy": "in_place", "recompute": "selective"}
LOCAL = {"library": "megatron-local", "attention": "unfused", "recompute": "full"}
SPLIT = {"vocabulary": "split"}


@pytest.mark.parametrize(
    ("strategy", "strategy_options", "model", "options"),
    [
        (MegatronSP, SPLIT, "causal-transformer-tiny-gqa", IN_PLACE),
        (MegatronSP, SPLIT, "gpt3-tiny", LOCAL | {"recompute_method": "block"}),
        (TensorParallel, {}, "gpt3-tiny", LOCAL | {"recompute_layers": 2}),
        (TensorParallel, {}, "bert-tiny", {"pre_norm": True, "library": "transformer-engine"}),
    ],
)
def test_models_of_libraries_are_green(
    pool: RankPool, strategy: type[Strategy], strategy_options: dict[str, str], model: str, options: dict
) -> None:
    case = Case(strategy, model_preset(model, options), "model", options=strategy_options)
    row = verify_case(pool, case, 2)
    assert row.status == "green", row


@pytest.mark.parametrize(
    ("fault", "strategy_options", "model_options"),
    [
        (faults.DenominatorOfOwnRows, {}, IN_PLACE),
        (faults.GradientsOfOwnPositionsAlone, SPLIT, {"cross_entropy": "fused"}),
        (faults.LabelsOfOwnPositions, SPLIT, IN_PLACE),
    ],
)
def test_planted_fault_is_red(
    pool: RankPool, fault: type[Strategy], strategy_options: dict[str, str], model_options: dict
) -> None:
    model = model_preset("causal-transformer-tiny-gqa", model_options)
    row = verify_case(pool, Case(fault, model, "model", options=strategy_options), 2)
    assert row.status == "RED"
    assert row.tensor, row.reason  # wrong, not broken
