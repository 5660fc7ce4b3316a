"""Positions in blocks, for the kernels of gated recurrences, and the decay between places of blocks.

Where a document begins, the decay from all earlier positions is 0. Packed documents need nothing else,
because a map of states that crosses a document's start forgets the state, within a block, past a block, and
past a rank. Kernels differ in where blocks lie: the blocks of fla begin again at each document (cu_seqlens),
the blocks of mamba_ssm go on over documents and mask pairs of positions of two documents (seq_idx).

Shapes: B batch, L sequence, Z heads, G heads of queries and keys, C blocks, size positions in a block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

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
    """The sums of g [B, L, Z] or [B, L, Z, D], and in its shape, from the start of a block up to each
    position. With ``from_end``, the sums go from each position to the block's end; this turns the gradient of
    the sums into the gradient of g. A new block begins at each position of ``starts``."""
    blocks = Blocks(g.shape[1], block, starts, anew=True)
    x = blocks.of(g, g.shape[2])
    return blocks.back(x.flip(3).cumsum(3).flip(3) if from_end else x.cumsum(3), g)


class BlockDecay:
    """The factors of decay in blocks, from the :func:`block_sums` of their logarithms: [B, L, Z] for a factor
    of each head, [B, L, Z, D] for a factor of each feature of a key. Every exponent is at most 0, so nothing
    overflows; below, F is 1 or D.

    Attributes:
        from_start: decay from the state before a block to each of its positions [B, Z, C, size, F].
        to_end: decay from each position to the state after its block [B, Z, C, size, F].
        across: decay of the rows of the state before a block up to the state after it [B, Z, C, F, 1].
    """

    def __init__(self, sums: Tensor, blocks: Blocks):
        self.blocks, self._by_head = blocks, sums.ndim == 3
        # padding repeats the last sum, so that it adds no decay
        x = blocks.of(sums, sums.shape[2], last=True)
        self._sums = x = x.unsqueeze(-1) if self._by_head else x
        self.from_start = x.exp()
        self.to_end = (x[..., -1:, :] - x).exp()
        self._begun = begun = blocks.begun(sums.device)
        if begun is not None:
            self.from_start *= (begun == 0).unsqueeze(-1)
            self.to_end *= (begun == begun[:, -1:]).unsqueeze(-1)
        self.across = self.from_start[..., -1:, :].mT

    def between(self) -> Tensor:
        """A head's decay from position j of a block to position i [B, Z, C, size, size], 0 where i < j."""
        sums = self._sums.squeeze(-1)
        distance = sums.unsqueeze(-1) - sums.unsqueeze(-2)
        return distance.masked_fill_(self._hidden(), -torch.inf).exp_()

    def _hidden(self) -> Tensor:
        """Whether position i does not see position j of the block [size, size] or [C, size, size]."""
        size = self._sums.shape[3]
        hidden = torch.ones(size, size, dtype=torch.bool, device=self._sums.device).triu_(1)
        if self._begun is None:
            return hidden
        return hidden | (self._begun.unsqueeze(-1) != self._begun.unsqueeze(-2))

    def _from_each(self) -> Iterator[tuple[int, Tensor]]:
        """Yields j and the decay of each feature from position j to all positions [B, Z, C, size, D]. The
        quotient of two factors of ``from_start`` would overflow, and all j at once would take size times the
        memory."""
        hidden = self._hidden()
        for j in range(self._sums.shape[3]):
            distance = self._sums - self._sums[..., j : j + 1, :]
            yield j, distance.masked_fill_(hidden[..., j : j + 1], -torch.inf).exp_()

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """The products P_ij = x_i . decay(j to i) y_j [B, Z, C, size, size] of x and y [B, Z, C, size, D]."""
        if self._by_head:
            return x @ y.mT * self.between()
        return torch.cat([(x * decay) @ y[..., j : j + 1, :].mT for j, decay in self._from_each()], -1)

    def product_gradients(self, d_p: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and y from the gradient of their :meth:`products`."""
        if self._by_head:
            d_p = d_p * self.between()
            return d_p @ y, d_p.mT @ x
        d_x, d_y = torch.zeros_like(x), []
        for j, decay in self._from_each():
            decay *= d_p[..., j : j + 1]
            d_x += decay * y[..., j : j + 1, :]
            d_y.append((decay * x).sum(-2))
        return d_x, torch.stack(d_y, -2)

    def of_gates(self, d_features: Tensor) -> Tensor:
        """The gradient of sums [..., F] from what each feature adds to it [..., D]; [...] for F = 1."""
        return d_features.sum(-1) if self._by_head else d_features

    def add_at_ends(self, d_sums: Tensor, d_ends: Tensor) -> None:
        """Add the gradients of blocks' last sums [B, Z, C, ...] to those of all sums [B, Z, C, size, ...]."""
        d_sums[:, :, torch.arange(d_sums.shape[2]), torch.tensor(self.blocks.ends())] += d_ends


def count_products(
    block: int, operator: Any, values: int, products: Callable[[int, int, int], int], features: int = 0
) -> None:
    """Register an operator's FLOPs: 2 ``products(n, D, A)`` for each position and head of v, where
    ``products`` counts multiplications, and n is the number of positions in a block, ``block`` at most. The
    operator's argument number ``features`` has D features, and number ``values`` has the shape of v."""

    @register_flop_formula(operator)
    def flops(*shapes: Any, out_val: Any = None, **_: Any) -> int:
        batch, length, heads, a = shapes[values]
        return 2 * batch * length * heads * products(min(block, length), shapes[features][-1], a)
