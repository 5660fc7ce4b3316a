"""Pieces of a fake tensor that are put together again at once, not cut.

torch's ``fully_shard`` gathers a weight that is sharded along another dim than its first, and sums its
gradient, by way of its pieces: as many as there are ranks, put together along the other dim. On 1,024 fake
ranks most of a step's time goes into making these. Where nothing has values, a view of the whole tensor that
has the shape of the pieces side by side does as well: it is one view, as the cut is one, and what is copied
then is as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spbench.bench.measure.trace.torch_internals import FakeTensor, fsdp_collectives, replaced


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


@contextmanager
def nothing_cut() -> Iterator[None]:
    """Inside, ``fully_shard`` cuts no fake tensor into pieces that it puts together at once."""
    with replaced(fsdp_collectives, {"torch": _TorchThatCutsNothing()}):
        yield
