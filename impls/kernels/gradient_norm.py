"""The sum of squares of many gradients in one kernel: multi_tensor_l2norm of apex and TransformerEngine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spbench.impls.kernels.operator import operator


@operator("spbench::sum_of_squares")
def sum_of_squares(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The sum [] of the squares of all elements, each times its tensor's share, in at least float32."""
    total = _zero(tensors)
    for x, share in zip(tensors, shares, strict=True):
        total += x.to(total.dtype).square().sum() * share
    return total


@sum_of_squares.register_fake
def _(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    return _zero(tensors)


def _zero(tensors: Sequence[Tensor]) -> Tensor:
    some = tensors[0]
    return some.new_zeros((), dtype=torch.promote_types(some.dtype, torch.float32))
