"""Softmax attention to keys that arrive in blocks (FlashAttention, arXiv 2205.14135, section 3.1; over ranks:
Ring Attention, arXiv 2310.01889, section 3).

A query's state is its output so far and the logarithm of its softmax's denominator; merging a further block
rescales both. Backward computes the gradients of each block from the final output and logarithm.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.kernels.kept_results import kept
from spbench.impls.kernels.ranged_attention import (
    Seen,
    attention_to_block,
    attention_to_block_backward,
    merge,
)
from spbench.impls.kernels.sinks import join_sinks, sinks_gradient
from spbench.impls.strategies.meetings import Meetings

#: (queries, keys, values, seen): the queries that see the block, as a slice of their positions; keys and
#: values [B, Z or fewer, n, A] of the block; keys that query i sees: all (False), j <= i (True), or ranges
Block = tuple[slice, Tensor, Tensor, Seen]


def attend_blocks(q: Tensor, blocks: Iterable[Block], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [B, Z, M, A] to the keys of all blocks, scores scaled by A**-0.5: o [B, Z, M, A]
    in q's dtype, and lse [B, Z, M], the logarithm of the denominators. All queries must see the first block.
    ``sinks`` [Z] join the softmax once, after the last block (:mod:`spbench.impls.kernels.sinks`)."""
    scale, so_far = q.shape[-1] ** -0.5, None
    for mine, keys, values, seen in blocks:
        block_o, block_lse = attention_to_block(q[:, :, mine], keys, values, scale, seen)
        if so_far is None:
            so_far = block_o.to(block_lse.dtype), block_lse
        else:
            o, lse = so_far
            merge(o[:, :, mine], lse[:, :, mine], block_o, block_lse)
    assert so_far is not None, "there is no block"
    o, lse = so_far
    if sinks is not None:
        lse = join_sinks(o, lse, sinks)
    return o.to(q.dtype), lse


class BlockwiseBackward:
    """Backward of :func:`attend_blocks`, a block at a time. All queries must see the first block.

    Args:
        d_o: gradient of o.
        q, o, lse, sinks: arguments and results of :func:`attend_blocks`.
    """

    def __init__(self, d_o: Tensor, q: Tensor, o: Tensor, lse: Tensor, sinks: Tensor | None = None):
        self.d_o, self.q, self.o, self.lse, self.sinks = d_o, q, o, lse, sinks
        self._sum: Tensor | None = None

    def of_block(self, mine: slice, keys: Tensor, values: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """The gradients of a block's keys and values from the queries ``mine``, shaped like the block."""
        d_o, q, o, lse = (x[:, :, mine] for x in (self.d_o, self.q, self.o, self.lse))
        scale = q.shape[-1] ** -0.5
        block = d_o, q, keys, values, o, lse, scale, seen
        d_queries, d_keys, d_values = attention_to_block_backward(*block)
        if self._sum is None:
            self._sum = d_queries.to(lse.dtype)
        else:
            self._sum[:, :, mine].add_(d_queries)
        return d_keys, d_values

    @property
    def d_sinks(self) -> Tensor | None:
        """The gradient [Z] of the sinks from all queries; None if there are no sinks."""
        return None if self.sinks is None else sinks_gradient(self.d_o, self.o, self.lse, self.sinks)

    @property
    def d_q(self) -> Tensor:
        """The gradient of q from all blocks so far, in q's dtype."""
        assert self._sum is not None, "there is no block"
        return self._sum.to(self.q.dtype)


@dataclass(frozen=True)
class KeyBlocks(ABC):
    """Keys and values of several ranks, to which this rank's queries attend block by block. A subclass
    fetches the blocks, in backward once more because kept blocks would take memory in each layer, and sends
    each block's gradients to the rank that owns it."""

    group: dist.ProcessGroup
    meetings: Meetings

    @abstractmethod
    def blocks(self, k: Tensor, v: Tensor) -> Iterable[Block]:
        """Yields the blocks, given this rank's k and v [B, G, L/N, A]; all queries see the first block."""

    @abstractmethod
    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's k and v [B, G, L/N, A], in their dtype or a more precise one."""


class _AttentionToBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, others: KeyBlocks) -> Tensor:
        o, lse = kept(lambda: attend_blocks(q, others.blocks(k, v), sinks))
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.others = others
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        backward = BlockwiseBackward(d_o, q, o, lse, sinks)
        d_k, d_v = ctx.others.gradients(backward, k, v)
        return backward.d_q, d_k.to(k.dtype), d_v.to(v.dtype), backward.d_sinks, None


def attention_to_blocks(
    q: Tensor, k: Tensor, v: Tensor, others: KeyBlocks, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention of q [B, Z, L/N, A] to the keys of several ranks (``others``), given this rank's k
    and v [B, G, L/N, A] -> [B, Z, L/N, A]. Keeps q, k, v, o and lse for backward. ``sinks`` [Z] join the
    softmax as in :func:`attend_blocks`."""
    result: Tensor = _AttentionToBlocks.apply(q, k, v, sinks, others)
    return result
