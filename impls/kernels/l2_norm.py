"""Vectors of length one: y = x / sqrt(sum(x^2) + eps), over the last dim of x [..., D].

As fla's kernel (modules/l2norm.py), the operator keeps its result and one number a row, in float32 for half
precisions; what comes next keeps the result anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.operator import operator

EPS = 1e-6


def plain_l2_norm(x: Tensor) -> Tensor:
    """The same in torch's own operators, which keep more."""
    precise = x.to(state_dtype(x.dtype))
    return (precise * (precise.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


@operator("spbench::l2_norm")
def _l2_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    rstd = (x.to(state_dtype(x.dtype)).square().sum(-1, keepdim=True) + EPS).rsqrt()
    return (x * rstd).to(x.dtype).contiguous(), rstd.contiguous()


@operator("spbench::l2_norm_backward")
def _l2_norm_backward(d_y: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    normal, d_y = y.to(rstd.dtype), d_y.to(rstd.dtype)
    return (rstd * (d_y - normal * (d_y * normal).sum(-1, keepdim=True))).to(y.dtype).contiguous()


@_l2_norm.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1, dtype=state_dtype(x.dtype))


@_l2_norm_backward.register_fake
def _(d_y: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    return y.new_empty(y.shape)


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, rstd = _l2_norm(x)
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        return _l2_norm_backward(d_y.contiguous(), *ctx.saved_tensors)


def l2_norm(x: Tensor, *, way: str = "fused") -> Tensor:
    """[..., D] -> [..., D]; ``way`` is "fused" or "plain"."""
    return plain_l2_norm(x) if way == "plain" else _L2Norm.apply(x)
