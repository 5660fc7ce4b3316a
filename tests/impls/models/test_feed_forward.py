"""A kind of feed-forward block that a model brings, as the example of plug-ins does."""

from __future__ import annotations

import importlib.util

import torch

from spbench.impls.strategies.base import Strategy
from tests.plugins.additions import EXAMPLES


def test_a_model_counts_the_parameters_of_its_own_blocks() -> None:
    spec = importlib.util.spec_from_file_location("two_step_lm", EXAMPLES / "two_step_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.PRESETS["two-step-lm-tiny"]
    with torch.device("meta"):
        built = model.build(Strategy(), 24)
    counts = model.parameters(model.padded_vocabulary(1))
    assert counts["elements"] == sum(p.numel() for p in built.parameters())
    assert counts["mlp"] == 2 * 4 * 48 * 96
