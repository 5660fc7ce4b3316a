"""A short causal convolution of each channel along the sequence and SiLU, which layers apply before a gated
recurrence.

    y_t = silu(bias + sum over i < W of weight_i x_(t - W + 1 + i))

Shapes: x, y [B, L, C], weight [C, W], bias [C] or none. The W - 1 positions before the first are ``before``
[B, W - 1, C], or zeros where it is None. A position sees zeros before its document: ``starts`` says where
documents begin, counted from the first position, negative in ``before``. As kernels for GPUs do
(causal-conv1d, fla's causal_conv1d), forward keeps only its inputs, and backward makes the sums before SiLU
again.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.kernels.operator import differentiable, operator


def plain_short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, starts: Sequence[int] = ()
) -> Tensor:
    """y [B, L, C] by torch's own operators, document by document, which keep more tensors for backward."""
    x, width = _with_before(x, weight, before), weight.shape[1]
    edges = [0, *(start + width - 1 for start in starts if start > 1 - width), x.shape[1]]
    documents = (F.pad(x[:, a:b], (0, 0, width - 1, 0)).mT for a, b in pairwise(edges))
    convolved = [F.conv1d(each, weight.unsqueeze(1), bias, groups=len(weight)) for each in documents]
    return F.silu(torch.cat(convolved, -1)[..., width - 1 :]).mT


def _with_before(x: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    """Returns x after the W - 1 positions before it, [B, W - 1 + L, C]."""
    return F.pad(x, (0, 0, weight.shape[1] - 1, 0)) if before is None else torch.cat((before, x), 1)


def _seen(x: Tensor, weight: Tensor, starts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yields for each place i < W of the weight: i, and the inputs that weight_i multiplies [B, L, C], zero
    where these are of another document; x is a result of :func:`_with_before`."""
    width = weight.shape[1]
    for place in range(width):
        seen = x[:, place : x.shape[1] - width + 1 + place]
        back = width - 1 - place
        if hidden := [i for start in starts for i in range(max(0, start), start + back) if i < seen.shape[1]]:
            seen = seen.index_fill(1, torch.tensor(hidden, device=x.device), 0)
        yield place, seen


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Sequence[int]) -> Tensor:
    """The sums before SiLU [B, L, C], from the x that :func:`_with_before` returns."""
    sums = sum(seen * weight[:, place] for place, seen in _seen(x, weight, starts))
    assert isinstance(sums, Tensor)
    return sums if bias is None else sums + bias


@operator("spbench::short_convolution", fake=lambda x, *_: x.new_empty(x.shape))
def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, starts: Sequence[int]
) -> Tensor:
    return F.silu(_sums(_with_before(x, weight, before), weight, bias, starts)).contiguous()


@operator(
    "spbench::short_convolution_backward",
    fake=lambda d_y, *arguments: tuple(d_y.new_empty(0 if x is None else x.shape) for x in arguments[:-1]),
)
def _convolved_backward(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    starts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, bias and ``before``; an empty tensor for one that is None."""
    width, x = weight.shape[1], _with_before(x, weight, before)
    sums = _sums(x, weight, bias, starts)
    share = sums.sigmoid()
    d_sums = d_y * share * (1 + sums * (1 - share))
    d_x, d_weight = torch.zeros_like(x), weight.new_zeros(weight.shape)
    shown = dict(_seen(torch.ones_like(x[:1, :, :1]), weight, starts))
    for place, seen in _seen(x, weight, starts):
        d_x[:, place : place + d_sums.shape[1]] += d_sums * shown[place] * weight[:, place]
        d_weight[:, place] = (d_sums * seen).sum((0, 1))
    d_bias = x.new_empty(0) if bias is None else d_sums.sum((0, 1))
    d_before = x.new_empty(0) if before is None else d_x[:, : width - 1].clone()
    return d_x[:, width - 1 :].contiguous(), d_weight, d_bias, d_before


_SHORT_CONVOLUTION = differentiable(
    _convolved, lambda d_y, *arguments: _convolved_backward(d_y.contiguous(), *arguments)
)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    starts: Sequence[int] = (),
) -> Tensor:
    """y [B, L, C] for x [B, L, C]; keeps only its arguments."""
    return _SHORT_CONVOLUTION(x, weight, bias, before, [*starts])
