"""Dropout with an explicit mask, alone and fused with bias and residual (Megatron-LM's bias_dropout_add)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("spbench::masked_scale", mutates_args=())
def masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """x where mask, times scale; zero elsewhere."""
    return (x * mask).mul_(scale)


@masked_scale.register_fake
def _(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


class _MaskedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return masked_scale(x, mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return masked_scale(gradient, mask, ctx.scale), None, None


def masked_dropout(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Dropout of probability p with a given boolean mask (True: kept) shaped like x."""
    return _MaskedDropout.apply(x, mask, 1 / (1 - p))


@torch.library.custom_op("spbench::bias_dropout_add", mutates_args=())
def _bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (x + bias).mul_(mask).mul_(scale).add_(residual)


@_bias_dropout_add.register_fake
def _(x: Tensor, bias: Tensor, residual: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.empty_like(residual)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, mask: Tensor, scale: float, keep_input: bool
    ) -> Tensor:
        ctx.save_for_backward(mask, x if keep_input else None)
        ctx.scale = scale
        return _bias_dropout_add(x, bias, residual, mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        mask, _ = ctx.saved_tensors
        d_x = masked_scale(gradient, mask, ctx.scale)
        return d_x, d_x.flatten(0, -2).sum(0), gradient, None, None, None


def bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, mask: Tensor, p: float, *, keep_input: bool = False
) -> Tensor:
    """residual + dropout(x + bias) for x, residual [..., H] and bias [H]; keeps the mask.

    ``keep_input`` keeps x too, which backward does not need: TorchScript's autodiff of this function in
    PyTorch 1.7 and 1.8 captured dropout's input as a dead value (pytorch issue 45524), 2 bytes an
    element beside the mask's 1.
    """
    return _BiasDropoutAdd.apply(x, bias, residual, mask, 1 / (1 - p), keep_input)
