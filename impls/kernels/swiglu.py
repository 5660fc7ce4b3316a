"""SwiGLU (arXiv 2002.05202) as one operator, which keeps its input alone (Megatron-LM's bias_swiglu)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("spbench::swiglu", mutates_args=())
def _swiglu(y: Tensor) -> Tensor:
    gate, up = y.unbind(-2)
    return (F.silu(gate) * up).contiguous()


@_swiglu.register_fake
def _(y: Tensor) -> Tensor:
    return y.new_empty(*y.shape[:-2], y.shape[-1])


@torch.library.custom_op("spbench::swiglu_backward", mutates_args=())
def _swiglu_backward(gradient: Tensor, y: Tensor) -> Tensor:
    gate, up = y.unbind(-2)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = gradient * up * (sigmoid + silu * (1 - sigmoid))
    return torch.stack((d_gate, gradient * silu), -2).contiguous()


@_swiglu_backward.register_fake
def _(gradient: Tensor, y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return _swiglu(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _swiglu_backward(gradient, *ctx.saved_tensors)


def swiglu(y: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side as y [..., 2, F] -> [..., F]."""
    return _SwiGLU.apply(y)
