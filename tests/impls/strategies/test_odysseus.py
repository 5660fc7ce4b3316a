"""Odysseus: MLPs on each rank's own positions, with weights that are whole or gathered for each product."""

from __future__ import annotations

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
        assert self.group is not None
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
