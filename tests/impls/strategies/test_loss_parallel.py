"""The loss of split logits and of gathered ones: what loss parallelism saves. Odysseus: MLPs on each rank's
own positions, with weights that are whole or gathered for each product."""

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.collectives import gather_from_group
from spbench.impls.kernels.projection import project
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.odysseus import Odysseus
from tests.measure.verify.assertions import assert_green, assert_red
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


def test_logits_gathered_in_full_precision_take_twice_the_bytes() -> None:
    """Automodel's masked loss, ``full_tensor()`` of what ``float()`` made; and in half precision neither the
    log-softmax nor its gradients are larger than the logits."""
    kinds = ("gathered", "plain"), ("gathered_float32", "plain"), ("gathered", "as_given")
    half, whole, given = (measured("tensor_parallel", loss, cross_entropy=way) for loss, way in kinds)
    assert half.formula_difference == whole.formula_difference == given.formula_difference == []
    (logits,) = (row for row in whole.formula if row["purpose"] == "logits")
    assert logits["payload_bytes"] == B * L * V * 4
    # three tensors of all logits at once in backward, each of two bytes less
    assert 5 * B * L * V < half.peak_memory_bytes - given.peak_memory_bytes < 7 * B * L * V


def test_the_loss_of_torch_takes_whole_logits() -> None:
    with pytest.raises(Unsupported, match=r"use strategy_options\.loss gathered"):
        measured("megatron_sp", "parallel", cross_entropy="as_given")


def test_held_logits_live_through_backward() -> None:
    held, freed = (measured("tensor_parallel", "gathered", logits_held=way) for way in ("as_made", "none"))
    part = B * L * V // N * 2
    assert held.peak_memory_bytes - freed.peak_memory_bytes == part


@pytest.mark.parametrize("n", [slow(3), 4])
@pytest.mark.parametrize("loss", ["gathered", "gathered_float32"])
@pytest.mark.parametrize("way", ["plain", "as_given"])
@pytest.mark.parametrize("strategy", SPLIT)
def test_gathered_logits_give_the_gradients_of_one_device(
    pool: RankPool, strategy: str, way: str, loss: str, n: int
) -> None:
    options = {**SPLIT[strategy], "loss": loss}
    model = model_preset("causal-transformer-tiny", {"cross_entropy": way})
    assert_green(pool, Case(nesting(strategy), model, "model", options=options), {"tp": n})


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


GROUPED = "causal-transformer-tiny-gqa"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "options", "model", "sizes"),
    [
        ("odysseus", {"mlp": "gathered", "gathered": "reused"}, {"recompute": "full"}, 2),
        ("odysseus", {"mlp": "gathered"}, {"separate_projections": True, "mlp_tile": 5}, 4),
        ("odysseus", {"mlp": "whole", "vocabulary": "split"}, {"recompute": "operators"}, 2),
        ("odysseus+ring_attention", {"mlp": "gathered"}, {}, {"tp": 2, "sp": 2}),
    ],
)
def test_options_are_green(
    pool: RankPool, strategy: str, options: dict[str, Any], model: dict[str, Any], sizes: Any
) -> None:
    preset = model_preset(GROUPED, {"layers": 1, **model})
    assert_green(pool, Case(nesting(strategy), preset, "model", options=options), sizes)


class _OwnGradientAlone(Odysseus):
    """A rank keeps its rows of a gathered weight's gradient from its own positions, and adds no other's."""

    def times_gathered(self, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        return project(x, gather_from_group(weight, dim, self.group))


def test_a_gradient_of_one_ranks_positions_is_seen(pool: RankPool) -> None:
    preset = model_preset(GROUPED, {"layers": 1})
    case = Case(_OwnGradientAlone, preset, "model", options={"mlp": "gathered"})
    assert_red(pool, case, 2, "gradient of blocks.0.mlp")


def sent(**options: Any) -> Counter[tuple[str, str]]:
    """Payload bytes by purpose and phase, of a layer in bfloat16."""
    cell = Cell.model_validate(
        {
            "model": "causal-transformer-tiny",
            "model_options": {"layers": 1},
            "strategy": "odysseus",
            "strategy_options": options,
            "sizes": {"tp": 4},
            "batch": 1,
            "seq_len": 64,
            "precision": "bf16",
        }
    )
    found = VirtualEngine().measure(cell)
    assert (found.status, found.formula_difference) == ("ok", [])
    payloads: Counter[tuple[str, str]] = Counter()
    for row in found.formula:
        payloads[row["purpose"], row["phase"]] += row["payload_bytes"]
    return payloads


def test_an_mlp_sends_its_weights_or_nothing() -> None:
    whole, gathered = sent(), sent(mlp="gathered")
    assert {key: nbytes for key, nbytes in gathered.items() if key not in whole} == {
        ("weights of an MLP", "forward"): 3 * 48 * 96 * 2,
        ("weights of an MLP, again", "backward"): 3 * 48 * 96 * 2,
        ("gradient of an MLP's weights", "backward"): 3 * 48 * 96 * 2,
    }
    # of activations, attention's alone
    assert whole["input of a block", "forward"] == 64 * 48 * 2
    assert whole["gradient of a block's output", "backward"] == 64 * 48 * 2


def test_a_gathered_mlp_has_no_biases() -> None:
    model = model_preset("gpt3-tiny")
    planned = Odysseus.planned(2, options={"mlp": "gathered"})
    with pytest.raises(Unsupported, match="mlp: gathered has no biases, which this model's MLPs have"):
        planned.check_sizes(model.sites(1, 8, 2))
    assert isinstance(Strategy.planned(1).of_mlp, Strategy)
