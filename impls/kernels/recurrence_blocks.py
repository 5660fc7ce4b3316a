"""Positions in blocks, for the kernels of gated recurrences, and what decays how far in these.

Where a document begins, the decay from all before it is 0. That is all there is to packed documents: a map of
states that crosses a document's start forgets the state, within a block, past a block, and past a rank. Where
blocks lie is the kernels' own matter: fla's begin anew at each document (cu_seqlens), mamba_ssm's go on over
documents, whose pairs they mask (seq_idx).

Shapes: B batch, L sequence, Z heads, G heads of queries and keys, C blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.operator import operator


@dataclass(frozen=True)
class Blocks:
    """How positions lie in blocks.

    Attributes:
        length: L.
        size: positions in a block.
        starts: the positions at which documents begin.
        anew: whether a block begins at each of these.
    """

    length: int
    size: int
    starts: Sequence[int] = ()
    anew: bool = False

    @cached_property
    def runs(self) -> list[int]:
        """The lengths of the runs of positions in each of which all blocks but the last are full."""
        edges = [0, *(start for start in self.starts if start and self.anew), self.length]
        return [end - start for start, end in pairwise(edges)]

    @property
    def count(self) -> int:
        """C."""
        return sum(-(-n // self.size) for n in self.runs)

    def of(self, x: Tensor, heads: int, *, last: bool = False) -> Tensor:
        """[B, L, G, ...] -> [B, Z, C, size, ...] in the states' dtype: each head as often as it has heads of
        v. Blocks that are not full are padded with zeros, or with the ``last`` of their positions."""
        x = x.to(state_dtype(x.dtype)).movedim(1, 2)
        x = torch.cat([self._padded(run, last) for run in x.split(self.runs, 2)], 2)
        return x.repeat_interleave(heads // x.shape[1], 1).unflatten(2, (-1, self.size))

    def _padded(self, run: Tensor, last: bool) -> Tensor:
        """[B, G, n, ...] -> [B, G, whole blocks, ...]."""
        missing = -run.shape[2] % self.size
        if last and missing:
            return torch.cat((run, *[run[:, :, -1:]] * missing), 2)
        return F.pad(run, (*(0, 0) * (run.ndim - 3), 0, missing))

    def back(self, x: Tensor, like: Tensor) -> Tensor:
        """What :meth:`of` makes, back to the shape and dtype of ``like``; what a head has several of is
        added."""
        padded = [-(-n // self.size) * self.size for n in self.runs]
        parts = zip(x.flatten(2, 3).split(padded, 2), self.runs, strict=True)
        x = torch.cat([part[:, :, :n] for part, n in parts], 2).movedim(2, 1)
        if x.shape[2] != like.shape[2]:
            x = x.unflatten(2, (like.shape[2], -1)).sum(3)
        return x.to(like.dtype).contiguous()

    def ends(self) -> list[int]:
        """The place in each block of the last of its positions [C]."""
        return [
            end for n in self.runs for end in [*[self.size - 1] * ((n - 1) // self.size), (n - 1) % self.size]
        ]

    def begun(self, device: torch.device) -> Tensor | None:
        """How many documents have begun in a block up to each of its places [C, size]; None: none begins
        anywhere."""
        if not self.starts:
            return None
        begins = torch.zeros(1, self.length, 1, device=device)
        begins[:, list(self.starts)] = 1
        return self.of(begins, 1).squeeze(0).squeeze(0).cumsum(-1)


@operator("spbench::recurrence_sums", fake=lambda g, block, from_end, starts: g.new_empty(g.shape))
def block_sums(g: Tensor, block: int, from_end: bool, starts: Sequence[int]) -> Tensor:
    """The sums [B, L, Z] of g [B, L, Z] over each block from its start up to each position; ``from_end``:
    from each position to its end, which gives the gradient of g from that of these sums. Blocks begin anew at
    each of the positions ``starts``."""
    blocks = Blocks(g.shape[1], block, starts, anew=True)
    x = blocks.of(g, g.shape[2])
    return blocks.back(x.flip(-1).cumsum(-1).flip(-1) if from_end else x.cumsum(-1), g)


class BlockDecay:
    """What decays how far in blocks, from the :func:`block_sums` [B, L, Z] of logarithms. Every exponent is
    at most 0, so nothing overflows.

    Attributes:
        from_start: from the state before a block to each of its positions [B, Z, C, size, 1].
        to_end: from each position to the state after its block [B, Z, C, size, 1].
        across: from the state before a block to the one after it [B, Z, C, 1, 1].
    """

    def __init__(self, sums: Tensor, blocks: Blocks):
        self.blocks = blocks
        # padding decays nothing
        self._sums = x = blocks.of(sums, sums.shape[2], last=True)
        self.from_start = x.exp().unsqueeze(-1)
        self.to_end = (x[..., -1:] - x).exp().unsqueeze(-1)
        self._begun = begun = blocks.begun(sums.device)
        if begun is not None:
            self.from_start *= (begun == 0).unsqueeze(-1)
            self.to_end *= (begun == begun[:, -1:]).unsqueeze(-1)
        self.across = self.from_start[..., -1:, :]

    def between(self) -> Tensor:
        """From position j of a block to position i >= j, else 0 [B, Z, C, size, size]."""
        distance = self._sums.unsqueeze(-1) - self._sums.unsqueeze(-2)
        hidden = torch.ones(distance.shape[-2:], dtype=torch.bool, device=distance.device).triu_(1)
        if self._begun is not None:
            hidden = hidden | (self._begun.unsqueeze(-1) != self._begun.unsqueeze(-2))
        return distance.masked_fill_(hidden, -torch.inf).exp_()

    def add_at_ends(self, d_sums: Tensor, d_ends: Tensor) -> None:
        """Add to the gradients of the sums [B, Z, C, size] those of each block's last one [B, Z, C]."""
        d_sums[:, :, torch.arange(d_sums.shape[2]), torch.tensor(self.blocks.ends())] += d_ends
