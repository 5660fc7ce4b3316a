"""Softmax attention of queries to some ranges of keys in one call, as kernels for packed documents do.

Where ranges are documents one after another, these kernels take cu_seqlens (FlashAttention's
flash_attn_varlen_func, arXiv 2205.14135). Elsewhere they take any list of rectangles, each with a band
(MagiAttention's flex-flash-attention). The kernels compute only pairs of a query and a key that it sees, and
allocate o and lse with the shapes of :mod:`spbench.impls.kernels.flash_attention`. A query may see several
ranges or none; without a range, its output is 0 and its lse is -inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.attended import Range, Ranges
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.flash_attention import (
    Window,
    backward_by_kernel,
    backward_by_scores,
    fake_backward,
    fake_forward,
    flash_attention,
    flash_attention_backward,
    forward_by_kernel,
    forward_by_scores,
    is_half,
    new_like,
    operator,
)
from spbench.impls.kernels.kept_results import kept

#: the keys of a block that queries see: all (False), those up to a query's own place (True), or some ranges
Seen = bool | Ranges

#: queries whose scores are in memory at once, for a band that no kernel of torch computes
_TILE = 512


def _ranges(text: str, q: Tensor) -> Iterator[tuple[Range, Window | None]]:
    """The ranges that an operator's argument ``text`` lists. A range that is neither whole nor causal comes
    with the window of a GPU's kernel for it, or without one in tiles."""
    windows = q.is_cuda and is_half(q)
    for each_range in Ranges.from_text(text):
        if each_range.whole or each_range.causal:
            yield each_range, None
        elif windows and (window := window_of(each_range)):
            yield each_range, window
        else:
            yield from ((tile, None) for tile in each_range.tiles(_TILE))


def window_of(seen: Range) -> Window | None:
    """A range's band as a window of FlashAttention, which aligns the last query with the last key and in
    which each query sees the key at its own place; None: FlashAttention has no such window."""
    offset = seen.keys - seen.queries
    left, right = offset - seen.low, seen.high - offset
    if min(offset, left, right) < 0:
        return None
    return left if left < seen.keys else -1, right if right < seen.keys else -1


def _parts(x: Range) -> tuple[slice, slice]:
    return slice(x.first_query, x.first_query + x.queries), slice(x.first_key, x.first_key + x.keys)


def _hidden(seen: Range, device: torch.device) -> Tensor:
    """The mask [queries, keys] of a range, True where the query does not see the key."""
    distance = torch.arange(seen.keys, device=device) - torch.arange(seen.queries, device=device)[:, None]
    return (distance < seen.low) | (distance > seen.high)


def _is_all(found: list[tuple[Range, Window | None]], q: Tensor, k: Tensor) -> bool:
    """Whether there is one range, of all queries and keys, so that its results need no merging."""
    return len(found) == 1 and found[0][0][:4] == (0, q.shape[2], 0, k.shape[2])


def _block_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Range, window: Window | None
) -> tuple[Tensor, Tensor]:
    if window:
        return forward_by_kernel(q, k, v, scale, False, window)
    if seen.whole or seen.causal:
        result: tuple[Tensor, Tensor] = flash_attention(q, k, v, scale, seen.causal and not seen.whole)
        return result
    return forward_by_scores(q, k, v, scale, _hidden(seen, q.device))


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, ranges: str) -> tuple[Tensor, Tensor]:
    own_ranges = [*_ranges(ranges, q)]
    if _is_all(own_ranges, q, k):
        return _block_forward(q, k, v, scale, *own_ranges[0])
    precise = state_dtype(q.dtype)
    o = new_like(q, v.shape[3]).to(precise).zero_()
    lse = torch.full_like(o[..., 0], -torch.inf).contiguous()
    for seen, window in own_ranges:
        mine, theirs = _parts(seen)
        block = _block_forward(q[:, :, mine], k[:, :, theirs], v[:, :, theirs], scale, seen, window)
        merge(o[:, :, mine], lse[:, :, mine], *block)
    return o.to(q.dtype), lse


def merge(o: Tensor, lse: Tensor, block_o: Tensor, block_lse: Tensor) -> None:
    """Merge the attention to a further block of keys into the attention (o, lse) so far, in place. A query
    may have seen no key so far (lse -inf), or may see no key of the block, but not both."""
    # exp(block_lse) / (exp(lse) + exp(block_lse)), the block's share of all weights
    share = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    o.lerp_(block_o.to(o.dtype), share)
    torch.logaddexp(lse, block_lse, out=lse)


def _block_backward(
    block: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    scale: float,
    seen: Range,
    window: Window | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if window:
        return backward_by_kernel(*block, scale, False, window)
    if seen.whole or seen.causal:
        result: tuple[Tensor, Tensor, Tensor] = flash_attention_backward(
            *block, scale, seen.causal and not seen.whole
        )
        return result
    return backward_by_scores(*block, scale, _hidden(seen, block[0].device))


def _backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    ranges: str,
) -> tuple[Tensor, Tensor, Tensor]:
    own_ranges = [*_ranges(ranges, q)]
    if _is_all(own_ranges, q, k):
        return _block_backward((d_o, q, k, v, o, lse), scale, *own_ranges[0])
    precise = state_dtype(q.dtype)
    d_q, d_k, d_v = (new_like(x, x.shape[3]).to(precise).zero_() for x in (q, k, v))
    for seen, window in own_ranges:
        mine, theirs = _parts(seen)
        d_out, queries, out, sums = (x[:, :, mine] for x in (d_o, q, o, lse))
        block = d_out, queries, k[:, :, theirs], v[:, :, theirs], out, sums
        gradients = _block_backward(block, scale, seen, window)
        for total, part, gradient in zip((d_q, d_k, d_v), (mine, theirs, theirs), gradients, strict=True):
            total[:, :, part].add_(gradient)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


#: (q, k, v, scale, text of the ranges) -> (o [B, Z, M, A], lse [B, Z, M])
ranged_attention = operator(
    "ranged_flash_attention(Tensor q, Tensor k, Tensor v, float scale, str ranges) -> (Tensor, Tensor)",
    _forward,
    fake_forward,
)
#: (d_o, q, k, v, o, lse, scale, text of the ranges) -> the gradients of q, k and v
ranged_attention_backward = operator(
    "ranged_flash_attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " float scale, str ranges) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake_backward,
)


def _pairs(q: Sequence[int], ranges: str) -> int:
    """The number of pairs of a query and a key that it sees, in all sequences and heads."""
    return q[0] * q[1] * Size.of(ranges).pairs


class Size(NamedTuple):
    """The number of ranges, a head's pairs of a query and a key that it sees, and the average over these
    pairs of the keys in the pair's range (at most the keys of its window), because kernels are slower on
    short ranges."""

    ranges: int
    pairs: int
    length: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, text: str) -> Size:
        """The sizes of the ranges whose :attr:`Ranges.text` is an operator's argument."""
        ranges = Ranges.from_text(text)
        pairs = ranges.pairs
        # in float64, for a sum of pairs x keys is beyond int64 at some million positions
        return cls(len(ranges), int(pairs.sum()), round(float(np.average(ranges.widths, weights=pairs))))


@register_flop_formula(torch.ops.spbench.ranged_flash_attention)
def _forward_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], scale: float, ranges: str, **_: Any
) -> int:
    return 2 * _pairs(q, ranges) * (q[3] + v[3])


@register_flop_formula(torch.ops.spbench.ranged_flash_attention_backward)
def _backward_flops(
    d_o: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **_: Any
) -> int:
    # as flash_attention's: the scores again, d_q and d_k; d_v and the gradient of the probabilities
    return 2 * _pairs(q, rest[-1]) * (3 * q[3] + 2 * v[3])


def attention_to_block(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen) -> tuple[Tensor, Tensor]:
    """Returns (o, lse) of attention to a block of keys; ``seen`` says which keys queries see."""
    result: tuple[Tensor, Tensor]
    if isinstance(seen, bool):
        result = flash_attention(q, k, v, scale, seen)
    else:
        result = ranged_attention(q, k, v, scale, seen.text)
    return result


def attention_to_block_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, seen: Seen
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of :func:`attention_to_block`, in the shapes of these."""
    result: tuple[Tensor, Tensor, Tensor]
    if isinstance(seen, bool):
        result = flash_attention_backward(d_o, q, k, v, o, lse, scale, seen)
    else:
        result = ranged_attention_backward(d_o, q, k, v, o, lse, scale, seen.text)
    return result


class _RangedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: str) -> Tensor:
        o, lse = kept(lambda: ranged_attention(q, k, v, q.shape[-1] ** -0.5, ranges))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.ranges = ranges
        result: Tensor = o
        return result

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, *others = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        return *ranged_attention_backward(d_o, q, *others, scale, ctx.ranges), None


def ranged_flash_attention(q: Tensor, k: Tensor, v: Tensor, ranges: Ranges) -> Tensor:
    """Returns o [B, Z, M, A] of softmax attention to only these ranges, scores scaled by A**-0.5. Each query
    must see at least one range. The function keeps q, k, v, o and lse."""
    result: Tensor = _RangedAttention.apply(q, k, v, ranges.text)
    return result
