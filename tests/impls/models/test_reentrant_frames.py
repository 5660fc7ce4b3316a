"""Recomputation that holds what torch's reentrant checkpoint holds, beside that checkpoint itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.impls.models.blocks import recomputation
from spbench.impls.models.model import model_preset
from tests.impls.models.test_recomputed_dropout import gradients

FULL = {"recompute": "full", "recompute_layers": 1}


def peak_bytes(**options: Any) -> int:
    """The peak of a step on one device, which is in backward."""
    asked = {
        "model": "causal-transformer-tiny",
        "strategy": "single",
        "batch": 2,
        "seq_len": 128,
        "model_options": {"layers": 4, "loss_tile": 16, **FULL, **options},
    }
    peak = tracing.trace(Cell.model_validate(asked)).memory.peak()
    assert peak.phase == "backward"
    return peak.nbytes


def by_torch(run: Callable[..., Any], *inputs: Any, **_: Any) -> Any:
    return checkpoint(run, *inputs, use_reentrant=True, preserve_rng_state=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"mlp_tile": 8, "attention": "flash_attention_2", "kv_heads": 1}],
    ids=["mlp", "attention"],
)
def test_the_peak_is_that_of_the_reentrant_checkpoint(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without, held = peak_bytes(**options), peak_bytes(**options, recompute_reentrant=True)
    assert held > without
    monkeypatch.setattr(recomputation, "checkpoint", by_torch)
    assert held == peak_bytes(**options)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_are_those_without_recomputation(dropout: float) -> None:
    plain, again = gradients(dropout=dropout), gradients(dropout=dropout, **FULL, recompute_reentrant=True)
    for name, gradient in plain.items():
        assert again[name].allclose(gradient, rtol=1e-11, atol=1e-14), name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recompute": "selective"}, "recompute_reentrant needs recompute: full"),
        ({"recompute": "operators"}, "recompute_reentrant needs recompute: full"),
        (FULL | {"recompute_early_stop": True}, "a reentrant checkpoint runs whole"),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model_preset("causal-transformer-tiny", {**options, "recompute_reentrant": True})
