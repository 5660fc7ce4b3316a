"""RoPE (arXiv 2104.09864) as one operator, which keeps the angles alone (TransformerEngine's fused RoPE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels.operator import operator


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (i, i + A/2) of x [..., L, A] turned by cos, sin [L, A/2], by torch's own operators."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotated_by_angles(x: Tensor, angles: Tensor) -> Tensor:
    """As :func:`fused_rotary`, by torch's operators as Megatron-Core calls them without the fusion
    (core/models/common/embeddings/rope_utils.py): each call makes and keeps cos and sin [L, A] of its own."""
    return rotated_by_halves(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def rotated_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As :func:`rotated`, of cos and sin [L, A] with two equal halves, as Hugging Face's models do it."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@operator("spbench::rotary")
def _rotary(x: Tensor, angles: Tensor, inverse: bool) -> Tensor:
    half = angles[..., : angles.shape[-1] // 2]
    cos, sin = half.cos().to(x.dtype), half.sin().to(x.dtype)
    return rotated(x, cos, -sin if inverse else sin).contiguous()


@_rotary.register_fake
def _(x: Tensor, angles: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)  # contiguous, whatever x is


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return _rotary(x, angles, False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _rotary(gradient, ctx.saved_tensors[0], True), None


def fused_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """x [..., L, A] turned by the angles [L, A], the two halves of which are equal, in at least float32 as
    libraries hold them -> a contiguous [..., L, A]."""
    return _Rotary.apply(x, angles)
