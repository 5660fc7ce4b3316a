"""The checker rejects what public code has had wrong in grouped-query attention and norms of keys."""

from __future__ import annotations

import pytest

from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.models.model import Model, model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.ulysses import Ulysses
from tests.bench.verification import grouped_query_faults as faults
from tests.bench.verification.attention_model import AttentionModel

#: two heads of keys and values, each of which two of four ranks hold
REPLICATED = model_preset("causal-transformer-tiny-gqa", {"kv_heads": 2})

# the fault, the model that shows it, and how the name of the worst tensor may begin
FAULTS: list[tuple[type[Strategy], Model, tuple[str, ...]]] = [
    (faults.ReplicasNotSummed, REPLICATED, ("gradient of layer.project.weight",)),
    (faults.ReplicasSummedOverAllRanks, REPLICATED, ("gradient of layer.project.weight",)),
    (faults.NormsOfOwnHeads, REPLICATED, ("gradient of layer.q_norm", "gradient of layer.k_norm")),
    (faults.NormsOfOwnPositions, REPLICATED, ("gradient of layer.q_norm", "gradient of layer.k_norm")),
    (faults.KeysInAnotherOrder, AttentionModel(kv_heads=2), ("output y", "gradient of input")),
    (
        faults.FirstQueryOfEachGroup,
        AttentionModel(kv_heads=4),
        ("gradient of input k", "gradient of input v"),
    ),
    (faults.KeyNormAfterAllToAll, faults.KeyNormModel(), ("output y", "gradient of")),
]


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize(("fault", "model", "plausible"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_planted_fault_is_red(
    pool: RankPool, fault: type[Strategy], model: Model, plausible: tuple[str, ...], dtype: str
) -> None:
    row = verify_case(pool, Case(fault, model, "attention", dtype), 4)
    assert row.status == "RED"
    assert row.tensor, row.reason  # wrong, not broken
    assert row.tensor.startswith(plausible), row


def test_a_norm_of_all_heads_before_the_all_to_all_is_green(pool: RankPool) -> None:
    row = verify_case(pool, Case(Ulysses, faults.KeyNormModel(), "attention"), 4)
    assert row.status == "green", row
