"""Positions in blocks, for the kernels of gated recurrences, and the decay between places of blocks.

Where a document begins, the decay from all earlier positions is 0. Packed documents need nothing else,
because a map of states that crosses a document's start forgets the state, within a block, past a block, and
past a rank. Kernels differ in where blocks lie: the blocks of fla begin again at each document (cu_seqlens),
the blocks of mamba_ssm go on over documents and mask pairs of positions of two documents (seq_idx).

Shapes: B batch, L sequence, Z heads, G heads of queries and keys, C blocks, size positions in a block.
"""

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
    """A division of positions into blocks.

    Attributes:
        length: L, the number of positions.
        size: positions in a block.
        starts: the positions at which documents begin.
        anew: whether a new block begins at each of ``starts``.
    """

    length: int
    size: int
    starts: Sequence[int] = ()
    anew: bool = False

    @cached_property
    def runs(self) -> list[int]:
        """The lengths of the runs of positions; in each run, all blocks but the last are full."""
        edges = [0, *(start for start in self.starts if start and self.anew), self.length]
        return [end - start for start, end in pairwise(edges)]

    @property
    def count(self) -> int:
        """C, the number of blocks."""
        return sum(-(-n // self.size) for n in self.runs)

    def of(self, x: Tensor, heads: int, *, last: bool = False) -> Tensor:
        """Returns x [B, L, G, ...] as [B, Z, C, size, ...] in the states' dtype, each head repeated Z/G
        times. Blocks that are not full are padded with zeros, or with their last position if ``last``."""
        x = x.to(state_dtype(x.dtype)).movedim(1, 2)
        x = torch.cat([self._padded(run, last) for run in x.split(self.runs, 2)], 2)
        return x.repeat_interleave(heads // x.shape[1], 1).unflatten(2, (-1, self.size))

    def _padded(self, run: Tensor, last: bool) -> Tensor:
        """Returns a run [B, G, n, ...] with n padded to a multiple of ``size``."""
        missing = -run.shape[2] % self.size
        if last and missing:
            return torch.cat((run, *[run[:, :, -1:]] * missing), 2)
        return F.pad(run, (*(0, 0) * (run.ndim - 3), 0, missing))

    def back(self, x: Tensor, like: Tensor) -> Tensor:
        """Returns x [B, Z, C, size, ...], a result of :meth:`of`, in the shape and dtype of ``like``; if
        ``like`` has fewer heads, the heads of each group are added up."""
        padded = [-(-n // self.size) * self.size for n in self.runs]
        parts = zip(x.flatten(2, 3).split(padded, 2), self.runs, strict=True)
        x = torch.cat([part[:, :, :n] for part, n in parts], 2).movedim(2, 1)
        if x.shape[2] != like.shape[2]:
            x = x.unflatten(2, (like.shape[2], -1)).sum(3)
        return x.to(like.dtype).contiguous()

    def ends(self) -> list[int]:
        """The place of each block's last position within the block, a list of C."""
        return [
            end for n in self.runs for end in [*[self.size - 1] * ((n - 1) // self.size), (n - 1) % self.size]
        ]

    def begun(self, device: torch.device) -> Tensor | None:
        """The number of documents that have begun in a block up to each of its places [C, size]; None: there
        are no documents."""
        if not self.starts:
            return None
        begins = torch.zeros(1, self.length, 1, device=device)
        begins[:, list(self.starts)] = 1
        return self.of(begins, 1).squeeze(0).squeeze(0).cumsum(-1)


@operator("spbench::recurrence_sums", fake=lambda g, block, from_end, starts: g.new_empty(g.shape))
def block_sums(g: Tensor, block: int, from_end: bool, starts: Sequence[int]) -> Tensor:
    """The sums [B, L, Z] of g [B, L, Z] from the start of a block up to each position. With ``from_end``, the
    sums go from each position to the block's end; this turns the gradient of the sums into the gradient of g.
    A new block begins at each position of ``starts``."""
    blocks = Blocks(g.shape[1], block, starts, anew=True)
    x = blocks.of(g, g.shape[2])
    return blocks.back(x.flip(-1).cumsum(-1).flip(-1) if from_end else x.cumsum(-1), g)


class BlockDecay:
    """The factors of decay in blocks, from the :func:`block_sums` [B, L, Z] of their logarithms. Every
    exponent is at most 0, so nothing overflows.

    Attributes:
        from_start: decay from the state before a block to each of its positions [B, Z, C, size, 1].
        to_end: decay from each position to the state after its block [B, Z, C, size, 1].
        across: decay from the state before a block to the state after it [B, Z, C, 1, 1].
    """

    def __init__(self, sums: Tensor, blocks: Blocks):
        self.blocks = blocks
        # padding repeats the last sum, so that it adds no decay
        self._sums = x = blocks.of(sums, sums.shape[2], last=True)
        self.from_start = x.exp().unsqueeze(-1)
        self.to_end = (x[..., -1:] - x).exp().unsqueeze(-1)
        self._begun = begun = blocks.begun(sums.device)
        if begun is not None:
            self.from_start *= (begun == 0).unsqueeze(-1)
            self.to_end *= (begun == begun[:, -1:]).unsqueeze(-1)
        self.across = self.from_start[..., -1:, :]

    def between(self) -> Tensor:
        """The decay from position j of a block to position i [B, Z, C, size, size], 0 where i < j."""
        distance = self._sums.unsqueeze(-1) - self._sums.unsqueeze(-2)
        hidden = torch.ones(distance.shape[-2:], dtype=torch.bool, device=distance.device).triu_(1)
        if self._begun is not None:
            hidden = hidden | (self._begun.unsqueeze(-1) != self._begun.unsqueeze(-2))
        return distance.masked_fill_(hidden, -torch.inf).exp_()

    def add_at_ends(self, d_sums: Tensor, d_ends: Tensor) -> None:
        """Add the gradients of blocks' last sums [B, Z, C] to those of all sums [B, Z, C, size]."""
        d_sums[:, :, torch.arange(d_sums.shape[2]), torch.tensor(self.blocks.ends())] += d_ends
