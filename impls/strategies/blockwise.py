"""Softmax attention to keys that come in blocks (FlashAttention, arXiv 2205.14135, section 3.1; over ranks:
Ring Attention, arXiv 2310.01889, section 3).

What a query has seen is held as its output so far and the logarithm of its softmax's denominator; a further
block is merged by rescaling both. Backward, these two are those of all blocks, and each block's gradients
follow.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward

#: (queries, keys, values, causal): the queries that see the block, as a slice of their positions; keys [B, Z
#: or fewer, n, A] and values of the block; whether the i-th of these queries sees only keys j <= i
Block = tuple[slice, Tensor, Tensor, bool]


def merge(o: Tensor, lse: Tensor, block_o: Tensor, block_lse: Tensor) -> None:
    """Merge the attention to a further block of keys into the attention (o, lse) so far, in place."""
    # exp(block_lse) / (exp(lse) + exp(block_lse)), the block's share of all weights
    share = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    o.lerp_(block_o.to(o.dtype), share)
    torch.logaddexp(lse, block_lse, out=lse)


def attend_blocks(q: Tensor, blocks: Iterable[Block]) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [B, Z, M, A] to the keys of all blocks, scores scaled by A**-0.5: o [B, Z, M, A]
    of q's dtype, and lse [B, Z, M] of :mod:`spbench.impls.kernels.flash_attention`. All queries see the first
    block."""
    scale, so_far = q.shape[-1] ** -0.5, None
    for mine, keys, values, causal in blocks:
        block_o, block_lse = flash_attention(q[:, :, mine], keys, values, scale, causal)
        if so_far is None:
            so_far = block_o.to(block_lse.dtype), block_lse
        else:
            o, lse = so_far
            merge(o[:, :, mine], lse[:, :, mine], block_o, block_lse)
    assert so_far is not None, "there is no block"
    o, lse = so_far
    return o.to(q.dtype), lse


class BlockwiseBackward:
    """Backward of :func:`attend_blocks`, a block at a time. All queries see the first block.

    Args:
        d_o: gradient of o.
        q, o, lse: the argument and the results of :func:`attend_blocks`.
    """

    def __init__(self, d_o: Tensor, q: Tensor, o: Tensor, lse: Tensor):
        self.d_o, self.q, self.o, self.lse = d_o, q, o, lse
        self._sum: Tensor | None = None

    def of_block(self, mine: slice, keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """The gradients of a block's keys and values by these queries, of their shapes and dtypes."""
        d_o, q, o, lse = (x[:, :, mine] for x in (self.d_o, self.q, self.o, self.lse))
        scale = q.shape[-1] ** -0.5
        d_queries, d_keys, d_values = flash_attention_backward(d_o, q, keys, values, o, lse, scale, causal)
        if self._sum is None:
            self._sum = d_queries.to(lse.dtype)
        else:
            self._sum[:, :, mine].add_(d_queries)
        return d_keys, d_values

    @property
    def d_q(self) -> Tensor:
        """The gradient of q by all blocks so far, of its dtype."""
        assert self._sum is not None, "there is no block"
        return self._sum.to(self.q.dtype)
