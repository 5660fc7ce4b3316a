"""Softmax attention of queries to one block of keys, with the logarithm of its denominator, as operators.

    lse_i = log sum over j of exp(scale q_i . k_j)        o_i = sum over j of exp(scale q_i . k_j - lse_i) v_j

From the o and lse of several blocks the attention to all of their keys can be put together, which torch's own
scaled_dot_product_attention hides (FlashAttention, arXiv 2205.14135; blockwise: arXiv 2310.01889). Shapes: q
[B, Z, M, A], k, v [B, Z, L, A]; lse [B, Z, M] in float32 for half precisions. ``causal`` means that query i
sees keys j <= i; M and L are then equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.kernels.linear_attention import state_dtype


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    precise = state_dtype(q.dtype)
    scores = (q.to(precise) @ k.to(precise).mT).mul_(scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _has_flash(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16)


@torch.library.custom_op("spbench::flash_attention", mutates_args=())
def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(o [B, Z, M, A] of q's dtype, lse [B, Z, M])."""
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    o = scores.sub_(lse.unsqueeze(-1)).exp_() @ v.to(scores.dtype)
    return o.to(q.dtype), lse


#: torch's CPU operator multiplies its tiles of queries with this many keys at a time, hidden or not
_KEYS_AT_A_TIME = 512


def _cpu_flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's CPU operators compute this block: one head size, and a pair of a query and a key (an
    empty one divides by zero there and kills the process)."""
    return q.shape[3] == v.shape[3] and q.numel() > 0 and k.numel() > 0


def _cpu_tiles(q: Tensor, causal: bool) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """The calls of torch's CPU operator that make up a block: (queries, keys, causal, mask added to scores).

    A causal block of up to 512 positions is cut into two halves of its queries, of which the first meets half
    of the keys: in one call every query would be multiplied with all of them.
    """
    length = q.shape[2]
    if not causal or not _KEYS_AT_A_TIME // 2 < length <= _KEYS_AT_A_TIME:
        yield slice(None), slice(None), causal, None
        return
    half = length // 2
    mask = q.new_full((length - half, length), -torch.inf).triu_(half + 1)
    yield slice(half), slice(half), True, None
    yield slice(half, None), slice(None), False, mask


def _with_adjacent_features(*tensors: Tensor) -> list[Tensor]:
    """The tensors with stride 1 in the last dim, which torch's CPU operators assume and do not check."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


@flash_attention.register_kernel("cpu")
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    if not _cpu_flash_takes(q, k, v):
        return flash_attention._init_fn(q, k, v, scale, causal)
    q, k, v = _with_adjacent_features(q, k, v)
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))
    for mine, theirs, top_left, mask in _cpu_tiles(q, causal):
        o[:, :, mine], lse[:, :, mine] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, mine], k[:, :, theirs], v[:, :, theirs], 0.0, top_left, attn_mask=mask, scale=scale
        )
    return o, lse


@flash_attention.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    if not _has_flash(q):
        return flash_attention._init_fn(q, k, v, scale, causal)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        False,
        scale=scale,
    )
    return o.transpose(1, 2).contiguous(), lse


@flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


@torch.library.custom_op("spbench::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's parts of the gradients of q, k and v, of their dtype.

    ``o`` and ``lse`` are those of the queries' attention to all their keys, in this block and in others.
    """
    p = _scores(q, k, scale, causal).sub_(lse.unsqueeze(-1)).exp_()
    d_out, queries, keys, values = (x.to(p.dtype) for x in (d_o, q, k, v))
    d_v = p.mT @ d_out
    share = (d_out * o).sum(-1, keepdim=True)
    d_scores = (d_out @ values.mT).sub_(share).mul_(p).mul_(scale)
    return (d_scores @ keys).to(q.dtype), (d_scores.mT @ queries).to(k.dtype), d_v.to(v.dtype)


@flash_attention_backward.register_kernel("cpu")
def _(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not _cpu_flash_takes(q, k, v):
        return flash_attention_backward._init_fn(d_o, q, k, v, o, lse, scale, causal)
    d_o, q, k, v, o = _with_adjacent_features(d_o, q, k, v, o)
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for mine, theirs, top_left, mask in _cpu_tiles(q, causal):
        queries, d_keys, d_values = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_o[:, :, mine],
            q[:, :, mine],
            k[:, :, theirs],
            v[:, :, theirs],
            o[:, :, mine],
            lse[:, :, mine],
            0.0,
            top_left,
            attn_mask=mask,
            scale=scale,
        )
        d_q[:, :, mine] = queries
        d_k[:, :, theirs].add_(d_keys)
        d_v[:, :, theirs].add_(d_values)
    return d_q, d_k, d_v


@flash_attention_backward.register_kernel("cuda")
def _(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not _has_flash(q):
        return flash_attention_backward._init_fn(d_o, q, k, v, o, lse, scale, causal)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's state; there is none
    gradients = torch.ops.aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (d_o, q, k, v, o)),
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        unused,
        unused,
        scale=scale,
    )
    d_q, d_k, d_v = (x.transpose(1, 2).contiguous() for x in gradients)
    return d_q, d_k, d_v


@flash_attention_backward.register_fake
def _(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _pairs(q: Sequence[int], k: Sequence[int], causal: bool) -> int:
    """Queries and keys that meet, in all sequences and heads."""
    batch, heads, m, _ = q
    return batch * heads * (m * (m + 1) // 2 if causal else m * k[2])


@register_flop_formula(torch.ops.spbench.flash_attention)
def _forward_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], scale: float, causal: bool, **_: Any
) -> int:
    return 2 * _pairs(q, k, causal) * (q[3] + v[3])


@register_flop_formula(torch.ops.spbench.flash_attention_backward)
def _backward_flops(
    d_o: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **_: Any
) -> int:
    # the scores again, d_q and d_k; d_v and the gradient of the probabilities
    return 2 * _pairs(q, k, rest[-1]) * (3 * q[3] + 2 * v[3])
