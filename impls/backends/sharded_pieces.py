"""The pieces of a parameter that torch's ``fully_shard`` looks at, cut without the others.

It cuts each parameter into as many pieces as there are ranks, twice, and takes the first and the rank's own.
On 1,024 fake ranks that is most of what a step costs to set up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

#: of torch.distributed.fsdp._fully_shard._fsdp_param: cuts a tensor into a list of ``num_chunks`` pieces, the
#: last of them empty where ``torch.chunk`` gives fewer
CUT = "_chunk_with_empty"


class Pieces:
    """The pieces of a tensor along a dim, each cut when it is asked for.

    Args:
        num_chunks: how many pieces; those behind the tensor's end are empty and of one dim.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        self._tensor, self._dim = tensor, dim
        self._each = math.ceil(tensor.shape[dim] / num_chunks)

    def __getitem__(self, number: int) -> Tensor:
        start, end = number * self._each, self._tensor.shape[self._dim]
        if start >= end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._each, end - start))


@contextmanager
def cut_when_asked() -> Iterator[None]:
    """Inside, ``fully_shard`` cuts no piece that it does not look at. With a torch that has another name for
    this it cuts all of them, which takes longer and is the same."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    before = getattr(_fsdp_param, CUT, None)
    if before is None:
        yield
        return
    setattr(_fsdp_param, CUT, Pieces)
    try:
        yield
    finally:
        setattr(_fsdp_param, CUT, before)
