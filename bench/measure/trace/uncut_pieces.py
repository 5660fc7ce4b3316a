"""Pieces of a fake tensor that are put together again at once, not cut.

torch's ``fully_shard`` gathers a weight that is sharded along another dim than its first, and sums its
gradient, by way of its pieces: as many as there are ranks, put together along the other dim. On 1,024 fake
ranks most of a step's time goes into making these. Where nothing has values, a view of the whole tensor that
has the shape of the pieces side by side does as well: it is one view, as the cut is one, and what is copied
then is as large.

Experts put the rows that they receive in another order, by as many pieces as ranks have experts together.
There the whole is as good as its pieces: forward cuts by one operator and copies by another, backward takes
a view of each piece, and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spbench.bench.measure.trace.torch_internals import FakeTensor, fsdp_collectives, replaced
from spbench.impls.kernels import permutation


class _Uncut:
    """All pieces of a tensor along a dim, of which there are ``number``, alike."""

    def __init__(self, whole: Tensor, number: int, dim: int):
        self._whole, self._number, self._dim = whole, number, dim

    def side_by_side(self, dim: int) -> Tensor:
        """A tensor with the shape of the pieces, put together along a dim."""
        shape = [*self._whole.shape]
        shape[self._dim] //= self._number
        shape[dim] *= self._number
        return self._whole.view(shape)


class _TorchThatCutsNothing:
    """The module torch, for one that asks for pieces only to put them together."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor] | _Uncut:
        alike = type(tensor) is FakeTensor and tensor.is_contiguous() and not tensor.shape[dim] % chunks
        return _Uncut(tensor, chunks, dim) if alike else torch.chunk(tensor, chunks, dim)

    def cat(self, tensors: Sequence[Tensor] | _Uncut, dim: int = 0, **out: Tensor) -> Tensor:
        pieces = [tensors.side_by_side(dim)] if isinstance(tensors, _Uncut) else [*tensors]
        return torch.cat(pieces, dim, **out)


class _Cut(torch.autograd.Function):
    """The whole in place of the pieces that :func:`torch.split` makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.cat([gradient])


class _PutTogether(torch.autograd.Function):
    """Those pieces in any order put together; ``views`` is called with their number, as backward takes a view
    of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, views: Callable[[int], None], pieces: int) -> Tensor:
        ctx.views, ctx.pieces = views, pieces
        return torch.cat([x])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.views(ctx.pieces)
        return gradient, None, None


def _reordering(views: Callable[[int], None]) -> Callable[..., Tensor]:
    reorder = permutation.reordered

    def reordered(x: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        if type(x) is not FakeTensor:
            return reorder(x, sizes, order)
        # torch takes no view of a piece without elements that has one dim
        pieces = len(sizes) if x.ndim > 1 else sum(size > 0 for size in sizes)
        return _PutTogether.apply(_Cut.apply(x), views, pieces)

    return reordered


@contextmanager
def nothing_cut(views: Callable[[int], None]) -> Iterator[None]:
    """Inside, neither ``fully_shard`` nor :func:`.permutation.reordered` cuts fake tensors into pieces that
    are put together at once.

    Args:
        views: takes a number of views that backward would have taken.
    """
    with (
        replaced(fsdp_collectives, {"torch": _TorchThatCutsNothing()}),
        replaced(permutation, {"reordered": _reordering(views)}),
    ):
        yield
