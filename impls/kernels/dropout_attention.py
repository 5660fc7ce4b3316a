"""Causal flash attention with dropout of its probabilities, without a tensor that keeps the mask.

FlashAttention (arXiv 2205.14135, appendix B.4) draws the mask from a counter and draws it again in backward,
so that it keeps only the output and lse, the logarithm of the softmax's denominator. Here a seed is used in
place of the counter. Shapes: q [B, Z, L, A]; k, v [B, G, L, A], where G divides Z; lse [B, Z, L], in float32
for half precisions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.flash_attention import backward_flops, forward_flops
from spbench.impls.kernels.operator import differentiable, operator


def _mask(scores: Tensor, p: float, seed: int) -> Tensor:
    """The factor of each probability, 0 or 1 / (1 - p), in the shape of the scores."""
    generator = torch.Generator(device=scores.device).manual_seed(seed)
    return torch.empty_like(scores).bernoulli_(1 - p, generator=generator).div_(1 - p)


def _whole_heads(q: Tensor, *kv: Tensor) -> list[Tensor]:
    """Each of ``kv`` [B, G, L, A] as [B, Z, L, A], a head for every head of queries, in the dtype of sums."""
    repeats = q.shape[1] // kv[0].shape[1]
    return [x.to(state_dtype(q.dtype)).repeat_interleave(repeats, 1) for x in kv]


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Scaled scores [B, Z, L, L], -inf where a key is later than its query."""
    scores = (q.to(keys.dtype) @ keys.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -torch.inf)


@operator("spbench::dropout_flash_attention")
def _forward(q: Tensor, k: Tensor, v: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
    keys, values = _whole_heads(q, k, v)
    scores = _scores(q, keys)
    lse = scores.logsumexp(-1)
    o = ((scores - lse.unsqueeze(-1)).exp_() * _mask(scores, p, seed)) @ values
    return o.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    o = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    return o, q.new_empty(batch, heads, length, dtype=state_dtype(q.dtype))


@operator("spbench::dropout_flash_attention_backward")
def _backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, p: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _whole_heads(q, k, v)
    d_out, queries = d_o.to(lse.dtype), q.to(lse.dtype)
    probabilities = (_scores(q, keys) - lse.unsqueeze(-1)).exp_()
    mask = _mask(probabilities, p, seed)
    d_v = (probabilities * mask).mT @ d_out
    share = (d_out * o.to(lse.dtype)).sum(-1, keepdim=True)
    d_scores = ((d_out @ values.mT) * mask - share) * probabilities * q.shape[-1] ** -0.5
    d_q, d_k = d_scores @ keys, d_scores.mT @ queries
    groups = k.shape[1]
    d_k, d_v = (x.unflatten(1, (groups, -1)).sum(2).to(k.dtype) for x in (d_k, d_v))
    return d_q.to(q.dtype).contiguous(), d_k.contiguous(), d_v.contiguous()


@_backward.register_fake
def _(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, p: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    return d_q, d_k, d_v


@register_flop_formula(torch.ops.spbench.dropout_flash_attention)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return forward_flops(q, k, v, True)


@register_flop_formula(torch.ops.spbench.dropout_flash_attention_backward)
def _backward_flops(d_o: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return backward_flops(q, k, v, True)


_ATTENTION = differentiable(_forward, _backward, lambda q, k, v, p, seed, o, lse: (q, k, v, o, lse, p, seed))


def dropout_flash_attention(q: Tensor, k: Tensor, v: Tensor, p: float, seed: int) -> Tensor:
    """Returns o [B, Z, L, A] (in memory [B, L, Z, A]) of causal softmax attention, scores scaled by A**-0.5,
    with dropout of probability p by the mask that the seed draws; keeps q, k, v, o and a float32 a query."""
    return _ATTENTION(q, k, v, p, seed)
