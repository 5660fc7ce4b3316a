"""Root-mean-square normalisation (arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps), with a weight or without.

As fused kernels do, the operator keeps its input and one number a row, in float32 for half precisions.
Without a weight, the norm is TransNormerLLM's "simple" norm (arXiv 2307.14995).
"""

from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.operator import differentiable, operator

EPS = 1e-6


def plain_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    """y of :func:`rms_norm` by torch's own operators, which keep more tensors for backward."""
    precise = x.to(state_dtype(x.dtype))
    y = precise * (precise.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight).to(x.dtype)


def rounded_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    """y of :func:`rms_norm` by torch's own operators in the order of Hugging Face's LlamaRMSNorm, which
    rounds to x's dtype before it multiplies by the weight."""
    y = plain_rms_norm(x, None, eps)
    return y if weight is None else weight * y


@operator("spbench::rms_norm")
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, as_weight: bool) -> tuple[Tensor, Tensor]:
    precise = x.to(state_dtype(x.dtype))
    rstd = (precise.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = precise * rstd
    y = (y if weight is None else y * weight).to(x.dtype).contiguous()
    return y.to(_result(x, weight, as_weight)), rstd.contiguous()


def _result(x: Tensor, weight: Tensor | None, as_weight: bool) -> torch.dtype:
    """The dtype of the result: the dtype of the weight if ``as_weight``, else of x."""
    return weight.dtype if as_weight and weight is not None else x.dtype


def _by_torch(x: Tensor, weight: Tensor | None, *_: Any) -> bool:
    """Whether torch's fused kernel for GPUs, which has no intermediates, takes these dtypes and shapes."""
    return x.dtype != torch.float64 and (weight is None or (weight.dtype == x.dtype and weight.ndim == 1))


@_rms_norm.register_kernel("cuda", _by_torch)
def _(x: Tensor, weight: Tensor | None, eps: float, as_weight: bool) -> tuple[Tensor, Tensor]:
    y, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
    return y.contiguous(), rstd.contiguous()


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, as_weight: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_result(x, weight, as_weight))
    return y, x.new_empty(*x.shape[:-1], 1, dtype=state_dtype(x.dtype))


@operator(
    "spbench::rms_norm_backward",
    fake=lambda gradient, x, rstd, weight: (
        x.new_empty(x.shape),
        x.new_empty(0) if weight is None else torch.empty_like(weight),
    ),
)
def _rms_norm_backward(
    gradient: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    normal, d_y = x.to(rstd.dtype) * rstd, gradient.to(rstd.dtype)
    d_normal = d_y if weight is None else d_y * weight
    d_x = rstd * (d_normal - normal * (d_normal * normal).mean(-1, keepdim=True))
    if weight is None:
        d_weight = x.new_empty(0)  # an operator must return a tensor for each result
    else:
        d_weight = (d_y * normal).sum_to_size(weight.shape).to(weight.dtype)
    return d_x.to(x.dtype).contiguous(), d_weight


@_rms_norm_backward.register_kernel("cuda", lambda gradient, x, rstd, weight: _by_torch(x, weight))
def _(gradient: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    wanted = [True, weight is not None]
    d_x, d_weight = torch.ops.aten._fused_rms_norm_backward(gradient, x, x.shape[-1:], rstd, weight, wanted)
    return d_x, x.new_empty(0) if weight is None else d_weight


_RMS_NORM = differentiable(
    lambda x, weight, eps: _rms_norm(x, weight, eps, False),
    lambda d_y, *kept: _rms_norm_backward(d_y.contiguous(), *kept),
    lambda x, weight, eps, y, rstd: (x, rstd, weight),
)


def _upcast_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    precise = x.to(state_dtype(x.dtype))
    again, rstd = _rms_norm(precise, weight, eps, True)
    d_x, d_weight = _rms_norm_backward(gradient.contiguous(), precise, rstd, weight)
    del again
    return d_x.to(x.dtype), d_weight


#: the way "upcast" of :func:`rms_norm`; keeps only x, and backward makes the copy and result again
_UPCAST_RMS_NORM = differentiable(
    lambda x, weight, eps: _rms_norm(x.to(state_dtype(x.dtype)), weight, eps, True)[0], _upcast_gradients
)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = EPS, *, way: str = "fused") -> Tensor:
    """y [..., H], contiguous, for x [..., H] and a weight [H] or with the last dims of x. ``way`` is "fused",
    "plain", "rounded" (:func:`rounded_rms_norm`) or "upcast": with a weight on a copy of x in full precision,
    made again in backward, as InternEvo calls apex's MixedFusedRMSNorm, which returns the weight's dtype."""
    if way in ("fused", "upcast"):
        return (_RMS_NORM if way == "fused" or weight is None else _UPCAST_RMS_NORM)(x, weight, eps)
    return (plain_rms_norm if way == "plain" else rounded_rms_norm)(x, weight, eps)


class RMSNorm(nn.Module):
    """:func:`rms_norm`, with a weight or without."""

    weight: nn.Parameter | None

    def __init__(self, hidden: int, *, weighted: bool, eps: float = EPS, way: str = "fused"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden)) if weighted else None
        self.eps, self.way = eps, way

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, way=self.way)
