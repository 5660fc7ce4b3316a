"""The checker rejects what goes wrong in Ulysses, Megatron-SP, Ring Attention and gathered keys."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.models.model import Model, model_preset
from spbench.impls.strategies.base import Strategy
from tests.bench.verification import sequence_faults as faults
from tests.bench.verification.attention_model import AttentionModel

ZIGZAG = {"placement": "zigzag"}
ROTARY = AttentionModel("causal_attention", rotary=True)
CAUSAL, LINEAR = AttentionModel("causal_attention"), AttentionModel("linear_attention")
BERT = model_preset("bert-tiny")

# the fault, its options, the model and the part that show it, and how the name of the worst tensor may begin
FAULTS: list[tuple[type[Strategy], dict[str, Any], Model, str, tuple[str, ...]]] = [
    (faults.HeadsInWrongOrder, {}, CAUSAL, "attention", ("output y", "gradient of")),
    (faults.DecayOfOtherHeads, {}, LINEAR, "attention", ("output y", "gradient of")),
    (faults.LocalSliceForReduceScatter, {}, BERT, "block", ("output y", "gradient of")),
    (faults.NormsNotReduced, {}, BERT, "block", ("gradient of layer.",)),
    (faults.StaleBlockInRingBackward, {}, CAUSAL, "attention", ("gradient of input",)),
    (faults.BackwardOfBlocksAlone, {}, CAUSAL, "attention", ("gradient of input",)),
    (faults.MergeWithoutRescaling, {}, CAUSAL, "attention", ("output y", "gradient of")),
    (faults.DecayOffByOneChunk, {}, LINEAR, "attention", ("output y", "gradient of")),
    (
        faults.StripesInAnotherOrder,
        {"placement": "striped"},
        CAUSAL,
        "attention",
        ("output y", "gradient of"),
    ),
    (faults.ZigzagUnderContiguousBlocks, ZIGZAG, CAUSAL, "attention", ("output y", "gradient of")),
    (faults.LocalSliceOfKeyGradients, ZIGZAG, CAUSAL, "attention", ("gradient of input",)),
    (faults.GatheredKeysRotatedInOrder, ZIGZAG, ROTARY, "attention", ("output y", "gradient of")),
]


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize(
    ("fault", "options", "model", "part", "plausible"), FAULTS, ids=[f[0].__name__ for f in FAULTS]
)
def test_planted_fault_is_red(
    pool: RankPool,
    fault: type[Strategy],
    options: dict[str, Any],
    model: Model,
    part: str,
    plausible: tuple[str, ...],
    dtype: str,
) -> None:
    row = verify_case(pool, Case(fault, model, part, dtype, options=options), 4)
    assert row.status == "RED"
    assert row.tensor, row.reason  # wrong, not broken
    assert row.tensor.startswith(plausible), row


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_log_sum_exp_in_half_precision_is_red(pool: RankPool, dtype: str) -> None:
    """In bfloat16 it is within the noise of outputs; the operator's own test holds it to float32 there."""
    row = verify_case(pool, Case(faults.LogSumExpInHalfPrecision, CAUSAL, "attention", dtype), 4)
    assert row.status == "RED"
    assert "not a scale" in row.verdict
