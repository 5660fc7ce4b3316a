"""SwiGLU (arXiv 2002.05202) of two projections, whose gradients are made in their memory, as Liger's kernel
does (liger_kernel/ops/swiglu.py, ``LigerSiLUMulFunction``): it keeps both projections, no SiLU, and backward
allocates nothing. Backward can run once only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("spbench::silu_times", mutates_args=())
def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@_silu_times.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("spbench::silu_times_backward_", mutates_args={"gate", "up"})
def _silu_times_backward_(gradient: Tensor, gate: Tensor, up: Tensor) -> None:
    """Makes of both projections the gradients with regard to them."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = gradient * up * (sigmoid + silu * (1 - sigmoid))
    up.copy_(gradient * silu)
    gate.copy_(d_gate)


@_silu_times_backward_.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor) -> None:
    return None


class _SwiGLUInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_times(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        _silu_times_backward_(gradient, gate, up)
        return gate, up


def swiglu_in_place(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up [..., F] of gate and up [..., F], which nothing else may read after forward."""
    return _SwiGLUInPlace.apply(gate, up)
