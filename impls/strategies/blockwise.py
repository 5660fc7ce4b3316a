"""Softmax attention to keys that come in blocks (FlashAttention, arXiv 2205.14135, section 3.1; over ranks:
Ring Attention, arXiv 2310.01889, section 3).

What a query has seen is held as its output so far and the logarithm of its softmax's denominator; a further
block is merged by rescaling both. Backward, these two are those of all blocks, and each block's gradients
follow.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from spbench.impls.kernels.ranged_attention import (
    Seen,
    attention_to_block,
    attention_to_block_backward,
    merge,
)
from spbench.impls.kernels.sinks import join_sinks, sinks_gradient

#: (queries, keys, values, seen): the queries that see the block, as a slice of their positions; keys [B, Z or
#: fewer, n, A] and values of the block; what they see of it: all, the i-th of them keys j <= i, or ranges
Block = tuple[slice, Tensor, Tensor, Seen]


def attend_blocks(q: Tensor, blocks: Iterable[Block], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [B, Z, M, A] to the keys of all blocks, scores scaled by A**-0.5: o [B, Z, M, A]
    of q's dtype, and lse [B, Z, M] of :mod:`spbench.impls.kernels.flash_attention`. All queries see the first
    block. ``sinks`` [Z] join the softmax once, behind the last block (:mod:`spbench.impls.kernels.sinks`)."""
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
    """Backward of :func:`attend_blocks`, a block at a time. All queries see the first block.

    Args:
        d_o: gradient of o.
        q, o, lse, sinks: arguments and results of :func:`attend_blocks`.
    """

    def __init__(self, d_o: Tensor, q: Tensor, o: Tensor, lse: Tensor, sinks: Tensor | None = None):
        self.d_o, self.q, self.o, self.lse, self.sinks = d_o, q, o, lse, sinks
        self._sum: Tensor | None = None

    def of_block(self, mine: slice, keys: Tensor, values: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """The gradients of a block's keys and values by these queries, of their shapes and dtypes."""
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
        """The gradient of the sinks, if there are any, by these queries."""
        return None if self.sinks is None else sinks_gradient(self.d_o, self.o, self.lse, self.sinks)

    @property
    def d_q(self) -> Tensor:
        """The gradient of q by all blocks so far, of its dtype."""
        assert self._sum is not None, "there is no block"
        return self._sum.to(self.q.dtype)
