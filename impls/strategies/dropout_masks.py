"""Random numbers of dropout that a parallel run can control.

Every dropout of a step is numbered. Its generator is seeded from (seed, step, number) and, where the
tensor is spread over ranks, from the rank too. So replicated tensors get the same mask on all ranks of
a group, spread tensors get different ones, and recomputation in activation checkpointing repeats a
mask exactly by winding the number back.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from spbench.impls.kernels.dropout import masked_dropout


class DropoutRandom:
    """The numbered dropout calls of one rank.

    Args:
        seed: of the whole run, the same on all ranks.
        rank: this rank's place in the group that spreads a sample.
    """

    def __init__(self, seed: int, rank: int):
        self.seed, self.rank = seed, rank
        self.step = 0
        self.number = 0

    def begin_step(self, step: int) -> None:
        """Number the dropout calls of training step ``step`` from zero."""
        self.step, self.number = step, 0

    def mask(self, x: Tensor, p: float, region: str) -> Tensor:
        """A boolean tensor like x, True (kept) with probability 1 - p.

        Args:
            region: "replicated" (the same mask on all ranks) or "sharded" (the rank's own).
        """
        rank = self.rank + 1 if region == "sharded" else 0
        generator = torch.Generator(device=x.device)
        generator.manual_seed(zlib.crc32(repr((self.seed, self.step, self.number, rank)).encode()))
        self.number += 1
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)

    def dropout(self, x: Tensor, p: float, region: str) -> Tensor:
        """Zero elements of x with probability p, scale the others by 1 / (1 - p); keeps a byte an element."""
        return x if p == 0 else masked_dropout(x, self.mask(x, p, region), p)
