"""Layer normalisation whose statistics are float32 for half precisions on every device.

That is how apex and CUDA have it. torch's CPU kernel keeps them in the input's precision, so a trace on
fake CPU tensors would count other bytes than a GPU holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_HALF = (torch.float16, torch.bfloat16)


@torch.library.custom_op("spbench::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    statistics = torch.float32 if x.dtype in _HALF else x.dtype
    # torch.library forbids outputs that alias each other or an input; these never do
    return y, mean.to(statistics), rstd.to(statistics)


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    statistics = torch.float32 if x.dtype in _HALF else x.dtype
    mean = x.new_empty(*x.shape[:-1], 1, dtype=statistics)
    return x.new_empty(x.shape), mean, torch.empty_like(mean)  # contiguous, whatever x is


@torch.library.custom_op("spbench::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if x.device.type == "cpu":
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    return torch.ops.aten.native_layer_norm_backward(
        gradient, x, x.shape[-1:], mean, rstd, weight, bias, [True, True, True]
    )


@_layer_norm_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(bias)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = _layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *_layer_norm_backward(gradient.contiguous(), *ctx.saved_tensors), None


class LayerNorm(nn.Module):
    """Layer normalisation over the last dim, [..., H] -> [..., H]; keeps its input and two numbers a row."""

    def __init__(self, hidden: int, eps: float = 1e-12):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)
