"""A root-mean-square norm and a gate as one operator, which layers apply after a gated recurrence.

    gate last:   y = x / rms(x) weight silu(z)      (Gated DeltaNet: FusedRMSNormGated of fla; KDA: sigmoid)
    gate first:  y = u / rms(u) weight, u = x silu(z)     (Mamba-2: RMSNormGated of mamba_ssm)

The norm is over the last dim of x, z and y [..., A]; the weight is [A], or has the last dims of x. As fused
kernels do, the operator keeps x, z and one number a row, in float32 for half precisions.

The L2 norm makes vectors of length one: y = x / sqrt(sum(x^2) + eps), over the last dim of x [..., D].

As fla's kernel does (modules/l2norm.py), its operator keeps y and one number a row, in float32 for half
precisions; the operator that reads y next keeps y anyway.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.operator import differentiable, operator


def plain_gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool, sigmoid: bool
) -> Tensor:
    """y of :func:`gated_norm` by torch's own operators, which keep more tensors for backward."""
    dtype = state_dtype(x.dtype)
    u, gate = x.to(dtype), (torch.sigmoid if sigmoid else F.silu)(z.to(dtype))
    if gate_first:
        u = u * gate
    u = u * (u.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(dtype)
    return (u if gate_first else u * gate).to(x.dtype)


@operator(
    "spbench::gated_norm",
    fake=lambda x, *_: (
        x.new_empty(x.shape),
        x.new_empty(*x.shape[:-1], 1, dtype=state_dtype(x.dtype)),
    ),
)
def _gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool, sigmoid: bool
) -> tuple[Tensor, Tensor]:
    dtype = state_dtype(x.dtype)
    u = x.to(dtype) * (torch.sigmoid if sigmoid else F.silu)(z.to(dtype)) if gate_first else x.to(dtype)
    rstd = (u.square().mean(-1, keepdim=True) + eps).rsqrt()
    return plain_gated_norm(x, z, weight, eps, gate_first, sigmoid).contiguous(), rstd.contiguous()


@operator(
    "spbench::gated_norm_backward",
    fake=lambda d_y, x, z, weight, *_: (
        x.new_empty(x.shape),
        z.new_empty(z.shape),
        weight.new_empty(weight.shape),
    ),
)
def _gated_norm_backward(
    d_y: Tensor, x: Tensor, z: Tensor, weight: Tensor, rstd: Tensor, gate_first: bool, sigmoid: bool
) -> tuple[Tensor, Tensor, Tensor]:
    precise, d_y = x.to(rstd.dtype), d_y.to(rstd.dtype)
    share = torch.sigmoid(z.to(rstd.dtype))
    gate, slope = (share, share * (1 - share)) if sigmoid else (z * share, share * (1 + z * (1 - share)))
    normal = rstd * (precise * gate if gate_first else precise)
    d_weighted = d_y if gate_first else d_y * gate
    d_normal = d_weighted * weight
    d_u = rstd * (d_normal - normal * (d_normal * normal).mean(-1, keepdim=True))
    d_x = d_u * gate if gate_first else d_u
    d_z = slope * (d_u * precise if gate_first else d_y * normal * weight)
    d_weight = (d_weighted * normal).sum_to_size(weight.shape)
    return d_x.to(x.dtype).contiguous(), d_z.to(z.dtype).contiguous(), d_weight.to(weight.dtype).contiguous()


_GATED_NORM = differentiable(
    _gated_norm,
    lambda d_y, *kept: _gated_norm_backward(d_y.contiguous(), *kept),
    lambda x, z, weight, eps, gate_first, sigmoid, y, rstd: (x, z, weight, rstd, gate_first, sigmoid),
)


def gated_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gate_first: bool,
    sigmoid: bool = False,
    way: str = "fused",
) -> Tensor:
    """y [..., A] for x and z [..., A]; ``way`` is "fused" or "plain", ``gate_first`` as in the module, and
    ``sigmoid`` whether the gate is sigmoid(z)."""
    norm = plain_gated_norm if way == "plain" else _GATED_NORM
    return norm(x, z, weight, eps, gate_first, sigmoid)


EPS = 1e-6


def plain_l2_norm(x: Tensor) -> Tensor:
    """y of :func:`l2_norm` by torch's own operators, which keep more tensors for backward."""
    precise = x.to(state_dtype(x.dtype))
    return (precise * (precise.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


@operator(
    "spbench::l2_norm",
    fake=lambda x: (x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1, dtype=state_dtype(x.dtype))),
)
def _l2_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    rstd = (x.to(state_dtype(x.dtype)).square().sum(-1, keepdim=True) + EPS).rsqrt()
    return (x * rstd).to(x.dtype).contiguous(), rstd.contiguous()


@operator("spbench::l2_norm_backward", fake=lambda d_y, y, rstd: y.new_empty(y.shape))
def _l2_norm_backward(d_y: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    normal, d_y = y.to(rstd.dtype), d_y.to(rstd.dtype)
    return (rstd * (d_y - normal * (d_y * normal).sum(-1, keepdim=True))).to(y.dtype).contiguous()


_L2_NORM = differentiable(
    _l2_norm, lambda d_y, *kept: _l2_norm_backward(d_y.contiguous(), *kept), lambda x, y, rstd: (y, rstd)
)


def l2_norm(x: Tensor, *, way: str = "fused") -> Tensor:
    """Returns x [..., D] with each vector scaled to length one; ``way`` is "fused" or "plain"."""
    return plain_l2_norm(x) if way == "plain" else _L2_NORM(x)
