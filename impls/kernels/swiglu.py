"""SwiGLU (arXiv 2002.05202), with a bias or without, as one operator, which keeps its input alone
(Megatron-LM's bias_swiglu)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _gate_and_up(y: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    return (y if bias is None else y + bias).unbind(-2)


@torch.library.custom_op("spbench::swiglu", mutates_args=())
def _swiglu(y: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = _gate_and_up(y, bias)
    return (F.silu(gate) * up).contiguous()


@_swiglu.register_fake
def _(y: Tensor, bias: Tensor | None) -> Tensor:
    return y.new_empty(*y.shape[:-2], y.shape[-1])


@torch.library.custom_op("spbench::swiglu_backward", mutates_args=())
def _swiglu_backward(gradient: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = _gate_and_up(y, bias)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = gradient * up * (sigmoid + silu * (1 - sigmoid))
    return torch.stack((d_gate, gradient * silu), -2).contiguous()


@_swiglu_backward.register_fake
def _(gradient: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    return y.new_empty(y.shape)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, bias)
        return _swiglu(y, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        y, bias = ctx.saved_tensors
        d_y = _swiglu_backward(gradient, y, bias)
        return d_y, None if bias is None else d_y.flatten(0, -3).sum(0)


def swiglu(y: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up, of gate and up side by side as y [..., 2, F] plus the bias [2, F] -> [..., F]."""
    return _SwiGLU.apply(y, bias)
