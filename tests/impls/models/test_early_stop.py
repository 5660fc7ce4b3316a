"""Recomputation that ends at the last tensor that backward needs, as torch's checkpoint does by default."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.traces import Trace
from spbench.impls.models.model import model_preset
from tests.impls.models.test_recomputed_dropout import gradients


def trace(**changes: Any) -> Trace:
    """A step of two layers."""
    asked: dict[str, Any] = {
        "model": "causal-transformer-tiny",
        "strategy": "single",
        "batch": 1,
        "seq_len": 16,
        "model_options": {"layers": 2},
    }
    return tracing.trace(Cell.model_validate(asked | changes), events=True)


def kernels(of: Trace) -> Counter[str]:
    assert of.program is not None
    program = of.program
    return Counter(program.names[program.name[i]] for i in range(len(program)) if program.kind[i] == 0)


@pytest.mark.parametrize(("layers_a_run", "runs"), [(1, 2), (2, 1)])
def test_the_last_product_of_a_run_and_what_follows_do_not_run_again(layers_a_run: int, runs: int) -> None:
    """The product that closes the MLP, and the sum with the hidden state."""
    full = {"layers": 2, "recompute": "full", "recompute_layers": layers_a_run}
    whole = kernels(trace(model_options=full))
    stopped = kernels(trace(model_options=full | {"recompute_early_stop": True}))
    assert whole - stopped == Counter({"mm": runs, "add": runs})
    assert not stopped - whole


@pytest.mark.covering(2)
@pytest.mark.parametrize("strategy", ["tensor_parallel", "megatron_sp", "ulysses", "ring_attention"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layers_a_run", [1, 2])
def test_bytes_are_those_of_the_closed_form(strategy: str, dropout: float, layers_a_run: int) -> None:
    axis = "tp" if strategy in ("tensor_parallel", "megatron_sp") else "sp"
    options = {"recompute": "full", "recompute_early_stop": True, "recompute_layers": layers_a_run}
    found = trace(
        strategy=strategy,
        sizes={axis: 2},
        model_options=options | {"layers": 4, "dropout": dropout},
    ).measurement(None)
    assert found.formula_difference == []


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_are_those_without_recomputation(dropout: float) -> None:
    plain = gradients(dropout=dropout)
    again = gradients(dropout=dropout, recompute="full", recompute_early_stop=True)
    for name, gradient in plain.items():
        assert again[name].allclose(gradient, rtol=1e-11, atol=1e-14), name


def test_it_is_of_full_recomputation() -> None:
    with pytest.raises(ValueError, match="recompute_early_stop needs recompute: full"):
        model_preset("causal-transformer-tiny", {"recompute": "selective", "recompute_early_stop": True})
