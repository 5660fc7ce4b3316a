"""Squared ReLU (arXiv 2109.08668) as one operator, which keeps its input alone (Megatron-LM compiles it)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("spbench::squared_relu", mutates_args=())
def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


@_squared_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("spbench::squared_relu_backward", mutates_args=())
def _squared_relu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x).mul_(2).mul_(gradient)


@_squared_relu_backward.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _squared_relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _squared_relu_backward(gradient, *ctx.saved_tensors)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 of x [...]."""
    return _SquaredReLU.apply(x)
