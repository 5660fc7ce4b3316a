"""Random numbers of dropout that a parallel run can control.

Every dropout of a step is numbered. Its generator is seeded from (seed, step, number) and, where the
tensor is spread over ranks, from the rank too. So replicated tensors get the same mask on all ranks of
a group, spread tensors get different ones, and recomputation in activation checkpointing repeats a
mask exactly by winding the number back.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from spbench.impls.axes import ALONE, Place
from spbench.impls.kernels.dropout import masked_dropout


class DropoutRandom:
    """The numbered dropout calls of one rank.

    Args:
        seed: of the whole run, the same on all ranks.
        place: of this rank on the mesh.
    """

    def __init__(self, seed: int, place: Place = ALONE):
        self.seed, self.place = seed, place
        self.step = 0
        self.number = 0

    def begin_step(self, step: int) -> None:
        """Number the dropout calls of training step ``step`` from zero."""
        self.step, self.number = step, 0

    def mask(self, x: Tensor, p: float, axes: Sequence[str]) -> Tensor:
        """A boolean tensor like x, True (kept) with probability 1 - p.

        Args:
            axes: of the mesh, over whose ranks x is spread, so that each has a mask of its own; without any
                the mask is the same on all ranks.
        """
        generator = torch.Generator(device=x.device).manual_seed(self.next_seed(axes))
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)

    def next_seed(self, axes: Sequence[str]) -> int:
        """The seed of the next numbered dropout; ``axes`` as in :meth:`mask`."""
        rank = self.place.rank(*axes) + 1 if axes else 0
        seed = zlib.crc32(repr((self.seed, self.step, self.number, rank)).encode())
        self.number += 1
        return seed

    def dropout(self, x: Tensor, p: float, axes: Sequence[str]) -> Tensor:
        """Zero elements of x with probability p, scale the others by 1 / (1 - p); keeps a byte an element.
        ``axes`` as in :meth:`mask`."""
        return x if p == 0 else masked_dropout(x, self.mask(x, p, axes), p)
