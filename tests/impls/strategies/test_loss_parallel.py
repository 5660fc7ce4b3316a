"""The loss of split logits and of gathered ones: what loss parallelism saves."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.nesting import nesting
from tests.measure.verify.assertions import assert_green
from tests.slow import slow

#: strategy -> the options with which it splits the vocabulary
SPLIT: dict[str, dict[str, str]] = {"tensor_parallel": {}, "megatron_sp": {"vocabulary": "split"}}
B, L, V, N = 2, 64, 1024, 4


def measured(strategy: str, loss: str, **model_options: Any) -> Any:
    return VirtualEngine().measure(
        Cell.model_validate(
            {
                "model": "causal-transformer-tiny",
                "model_options": {"vocabulary": V, "layers": 1, **model_options},
                "strategy": strategy,
                "strategy_options": {**SPLIT[strategy], "loss": loss},
                "sizes": {"tp": N},
                "batch": B,
                "seq_len": L,
                "precision": "bf16",
            }
        )
    )


@pytest.mark.parametrize("cross_entropy", ["plain", "fused", "loss_parallel"])
@pytest.mark.parametrize("strategy", SPLIT)
def test_gathered_logits_take_bytes_and_memory(strategy: str, cross_entropy: str) -> None:
    parallel, gathered = (
        measured(strategy, loss, cross_entropy=cross_entropy) for loss in ("parallel", "gathered")
    )
    assert parallel.formula_difference == gathered.formula_difference == []
    (logits,) = (row for row in gathered.formula if row["purpose"] == "logits")
    assert (logits["collective"], logits["payload_bytes"]) == ("all_gather", B * L * V * 2)
    assert not any(row["purpose"] == "logits" for row in parallel.formula)
    assert not any(row["purpose"] == "cross entropy" for row in gathered.formula)
    # in place of a part, every rank has all logits in float32 for the loss
    assert gathered.peak_memory_bytes - parallel.peak_memory_bytes > B * L * V * (1 - 1 / N) * 4


@pytest.mark.parametrize("n", [slow(3), 4])
@pytest.mark.parametrize("strategy", SPLIT)
def test_gathered_logits_give_the_gradients_of_one_device(pool: RankPool, strategy: str, n: int) -> None:
    options = {**SPLIT[strategy], "loss": "gathered"}
    case = Case(nesting(strategy), model_preset("causal-transformer-tiny"), "model", options=options)
    assert_green(pool, case, {"tp": n})


def test_whole_logits_cannot_be_gathered() -> None:
    with pytest.raises(ValueError, match="use it with vocabulary: split"):
        nesting("megatron_sp").options_type(loss="gathered")


def test_the_loss_of_torch_has_four_tensors_at_once() -> None:
    """torch's ``loss_parallel`` works in nothing in place; beside a copy that is worked in stands the
    gradient in half precision alone."""
    in_place, beside = (
        measured("tensor_parallel", "parallel", cross_entropy=way).peak_memory_bytes
        for way in ("fused", "loss_parallel")
    )
    part = B * L * V // N * 4
    assert 2.4 * part < beside - in_place < 2.6 * part


@pytest.mark.parametrize("strategy", SPLIT)
def test_the_loss_of_torch_gives_the_gradients_of_one_device(pool: RankPool, strategy: str) -> None:
    model = model_preset("causal-transformer-tiny", {"cross_entropy": "loss_parallel"})
    assert_green(pool, Case(nesting(strategy), model, "model", options=SPLIT[strategy]), {"tp": 4})
