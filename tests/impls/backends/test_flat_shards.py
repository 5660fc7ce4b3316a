"""The flat gradient of fsdp_flat: what is left of the whole weights when backward has made it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from spbench.impls.backends.fsdp_flat import FlatFullySharded


def test_nothing_is_left_of_whole_weights_whose_gradient_is_summed() -> None:
    """Also not an element, whose block of 512 bytes a unit would add to exact peaks."""
    flat = torch.ones(12).requires_grad_()
    flat.grad = torch.full((12,), 2.0)
    unit: Any = SimpleNamespace(names=(), gradient=None)
    backend: Any = SimpleNamespace(owners={}, scattered=lambda unit, gradient: gradient[:6])
    FlatFullySharded._scatter(backend, unit, flat)
    assert flat.untyped_storage().nbytes() == 0
    assert flat.grad is None
    assert unit.gradient.tolist() == [2.0] * 6
