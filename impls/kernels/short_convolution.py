"""A short causal convolution of each channel along the sequence, and SiLU: what stands before a gated
recurrence.

    y_t = silu(bias + sum over i < W of weight_i x_(t - W + 1 + i))

Shapes: x, y [B, L, C], weight [C, W], bias [C] or none. The W - 1 positions before the first are ``before``
[B, W - 1, C], or zeros where it is None. As kernels for GPUs have it (causal-conv1d, fla's causal_conv1d),
nothing is kept but the inputs: backward makes the sums before SiLU again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    """The same in torch's own operators, which keep more."""
    x = _with_before(x, weight, before)
    return F.silu(F.conv1d(x.mT, weight.unsqueeze(1), bias, groups=len(weight))).mT


def _with_before(x: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    """[B, W - 1 + L, C]."""
    return F.pad(x, (0, 0, weight.shape[1] - 1, 0)) if before is None else torch.cat((before, x), 1)


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What SiLU is of [B, L, C], from the x that :func:`_with_before` returns."""
    width = weight.shape[1]
    sums = sum(x[:, i : x.shape[1] - width + 1 + i] * weight[:, i] for i in range(width))
    assert isinstance(sums, Tensor)
    return sums if bias is None else sums + bias


@torch.library.custom_op("spbench::short_convolution", mutates_args=())
def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    return F.silu(_sums(_with_before(x, weight, before), weight, bias)).contiguous()


@torch.library.custom_op("spbench::short_convolution_backward", mutates_args=())
def _convolved_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, bias and ``before``; empty of what is not there."""
    width, x = weight.shape[1], _with_before(x, weight, before)
    sums = _sums(x, weight, bias)
    share = sums.sigmoid()
    d_sums = d_y * share * (1 + sums * (1 - share))
    d_x, parts = torch.zeros_like(x), range(width)
    for i in parts:
        d_x[:, i : i + d_sums.shape[1]] += d_sums * weight[:, i]
    d_weight = torch.stack([(d_sums * x[:, i : i + d_sums.shape[1]]).sum((0, 1)) for i in parts], 1)
    d_bias = x.new_empty(0) if bias is None else d_sums.sum((0, 1))
    d_before = x.new_empty(0) if before is None else d_x[:, : width - 1].clone()
    return d_x[:, width - 1 :].contiguous(), d_weight, d_bias, d_before


@_convolved.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@_convolved_backward.register_fake
def _(d_y: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(d_y.new_empty(0 if x is None else x.shape) for x in inputs)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, before)
        return _convolved(x, weight, bias, before)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = _convolved_backward(d_y.contiguous(), *inputs)
        return tuple(None if x is None else d_x for x, d_x in zip(inputs, gradients, strict=True))


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """y [B, L, C] of x [B, L, C]."""
    return _ShortConvolution.apply(x, weight, bias, before)
