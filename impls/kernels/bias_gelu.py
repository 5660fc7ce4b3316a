"""gelu(x + bias), keeping x alone for backward (Megatron-LM's bias_gelu)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("spbench::bias_gelu", mutates_args=())
def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


@_bias_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("spbench::bias_gelu_backward", mutates_args=())
def _bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(gradient, x + bias, approximate="tanh")


@_bias_gelu_backward.register_fake
def _(gradient: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return _bias_gelu(x, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        d_x = _bias_gelu_backward(gradient, *ctx.saved_tensors)
        return d_x, d_x.flatten(0, -2).sum(0)


def bias_gelu(x: Tensor, bias: Tensor, *, fused: bool) -> Tensor:
    """gelu(x + bias) with the tanh approximation, x [..., F], bias [F].

    Fused it keeps x; unfused it keeps x + bias, and x + bias lives beside x for a moment.
    """
    return _BiasGelu.apply(x, bias) if fused else F.gelu(x + bias, approximate="tanh")
