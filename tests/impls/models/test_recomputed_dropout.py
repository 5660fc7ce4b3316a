"""Recomputation draws the dropout masks of the forward that it repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import default_dtype, initialize


def gradients(**options: Any) -> dict[str, torch.Tensor]:
    """Gradients of gpt3-tiny with dropout, by parameter."""
    model = model_preset("gpt3-tiny", {"dropout": 0.2, "attention_dropout": 0.3, **options})
    with default_dtype(torch.float64):
        module = model.build(Strategy(seed=5), 16)
        initialize(module, 0, deviation=0.3)
        batch = model.inputs(2, 16, torch.Generator().manual_seed(1))
        module(batch)["loss"].backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize(
    "recompute",
    [{"recompute": "selective"}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": 2}],
)
def test_gradients_are_those_without_recomputation(attention: str, recompute: dict[str, Any]) -> None:
    library = {"library": "megatron-local", "attention": attention}
    plain, again = gradients(**library), gradients(**library, **recompute)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-11, atol=1e-14)


def test_dropout_changes_gradients() -> None:
    """Else the test above could not fail."""
    dropped, whole = gradients(), gradients(dropout=0.0, attention_dropout=0.0)
    assert any(not torch.allclose(dropped[name], gradient) for name, gradient in whole.items())
