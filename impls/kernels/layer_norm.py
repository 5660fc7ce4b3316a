"""Layer normalisation whose statistics are float32 for half precisions on every device.

apex and torch's CUDA kernel keep the mean and 1 / deviation of a row in float32. torch's CPU kernel keeps the
two in the input's precision, so a trace on fake CPU tensors would count other bytes than a GPU holds.
"""

import torch
from torch import Tensor, nn

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.operator import differentiable, operator


@operator("spbench::layer_norm")
def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    statistics = state_dtype(x.dtype)
    # torch.library forbids outputs that alias each other or an input; these never do
    return y, mean.to(statistics), rstd.to(statistics)


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(*x.shape[:-1], 1, dtype=state_dtype(x.dtype))
    return x.new_empty(x.shape), mean, torch.empty_like(mean)  # contiguous, whatever x is


@operator("spbench::layer_norm_backward")
def _layer_norm_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if x.device.type == "cpu":
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    weighted = weight is not None
    d_x, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
        gradient, x, x.shape[-1:], mean, rstd, weight, bias, [True, weighted, weighted]
    )
    # an operator must return a tensor for each result
    return (d_x, d_weight, d_bias) if weighted else (d_x, x.new_empty(0), x.new_empty(0))


@_layer_norm_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    d_x = x.new_empty(x.shape)  # the first to be allocated
    d_weight, d_bias = (x.new_empty(0) if p is None else torch.empty_like(p) for p in (weight, bias))
    return d_x, d_weight, d_bias


_LAYER_NORM = differentiable(
    _layer_norm,
    lambda d_y, *kept: _layer_norm_backward(d_y.contiguous(), *kept),
    lambda x, weight, bias, eps, y, mean, rstd: (x, mean, rstd, weight, bias),
)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Returns x [..., H] normalised over the last dim, with a weight [H] and a bias [H] or without both;
    keeps x and two numbers a row."""
    y: Tensor = _LAYER_NORM(x, weight, bias, eps)
    return y


class LayerNorm(nn.Module):
    """:func:`layer_norm` with weights of its own, or without any."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, hidden: int, eps: float = 1e-12, *, weighted: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden)) if weighted else None
        self.bias = nn.Parameter(torch.zeros(hidden)) if weighted else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)
