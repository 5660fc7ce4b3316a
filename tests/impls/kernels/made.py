"""Inputs and comparisons of the tests of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def made(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def bits(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def assert_same(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """The same values and the same gradients of all inputs, to float64's rounding."""
    y, expected = ours(*inputs), plain(*inputs)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    weight = made(*y.shape, seed=9).detach()
    ours_of, plain_of = (torch.autograd.grad((x * weight).sum(), inputs) for x in (y, expected))
    torch.testing.assert_close(ours_of, plain_of, rtol=1e-10, atol=1e-13)


def bytes_kept(function: Callable[[], Any]) -> int:
    """Bytes of the distinct tensors that a forward saves for backward."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function()
    del result
    return sum(kept.values())
