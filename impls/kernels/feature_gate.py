"""The logarithm of the decay of each feature of a key (KDA, arXiv 2510.26692, equation 10), as one operator.

    g = -exp(A_log) softplus(x + dt_bias)

As fla's kernel does (ops/kda/gate.py), the operator keeps only its inputs, and backward computes the softplus
again. Shapes: x [B, L, Z, D], A_log [Z], dt_bias [Z, D], g [B, L, Z, D] in the states' dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.operator import operator


def plain_feature_gate(x: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g by torch's own operators, which keep more tensors for backward."""
    x, a_log, dt_bias = (y.to(state_dtype(x.dtype)) for y in (x, a_log, dt_bias))
    return -a_log.exp().unsqueeze(-1) * F.softplus(x + dt_bias)


@operator("spbench::feature_gate", fake=lambda x, *_: x.new_empty(x.shape, dtype=state_dtype(x.dtype)))
def _gate(x: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    return plain_feature_gate(x, a_log, dt_bias).contiguous()


@operator(
    "spbench::feature_gate_backward", fake=lambda d_g, *inputs: tuple(x.new_empty(x.shape) for x in inputs)
)
def _gate_backward(d_g: Tensor, x: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, A_log and dt_bias."""
    steps = x.to(d_g.dtype) + dt_bias.to(d_g.dtype)
    rate = -a_log.to(d_g.dtype).exp().unsqueeze(-1)
    d_x, d_rate = d_g * rate * steps.sigmoid(), d_g * rate * F.softplus(steps)
    return (
        d_x.to(x.dtype).contiguous(),
        d_rate.sum((0, 1, 3)).to(a_log.dtype),
        d_x.sum((0, 1)).to(dt_bias.dtype),
    )


class _FeatureGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _gate(*inputs)

    @staticmethod
    def backward(ctx: Any, d_g: Tensor) -> tuple[Tensor, ...]:
        return _gate_backward(d_g.contiguous(), *ctx.saved_tensors)


def feature_gate(x: Tensor, a_log: Tensor, dt_bias: Tensor, way: str = "fused") -> Tensor:
    """g [B, L, Z, D]; ``way`` is "fused" or "plain"."""
    return (plain_feature_gate if way == "plain" else _FeatureGate.apply)(x, a_log, dt_bias)
