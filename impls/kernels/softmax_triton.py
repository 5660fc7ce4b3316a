"""The operators of :mod:`spbench.impls.kernels.softmax` for GPUs. One program computes one row of
scores in float32 sums, and writes only the result.
"""

# arguments of kernels have no types before they are compiled
# mypy: allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: scores of a row that each warp computes
_A_WARP = 1024


@triton.jit
def _softmax(
    scores, mask, out, heads, queries, keys, scale,
    s_batch, s_head, s_query, s_key, m_batch, m_head, m_query, m_key,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the softmax of one row of scores; ``mask`` is None, or 1 where a key is hidden."""
    row = tl.program_id(0).to(tl.int64)
    query, head, batch = row % queries, row // queries % heads, row // queries // heads
    key = tl.arange(0, BLOCK)
    inside = key < keys
    start = batch * s_batch + head * s_head + query * s_query
    x = tl.load(scores + start + key * s_key, mask=inside, other=0.0).to(tl.float32) * scale
    if mask is not None:
        hidden = tl.load(mask + batch * m_batch + head * m_head + query * m_query + key * m_key, mask=inside)
        x = tl.where(hidden != 0, MASKED, x)
    if CAUSAL:
        x = tl.where(key > query, float("-inf"), x)
    x = tl.where(inside, x, float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out + row * keys + key, (e / tl.sum(e, 0)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(gradient, probabilities, keys, scale, BLOCK: tl.constexpr):
    """Overwrite one row of the probabilities' gradient with the gradient of the scores."""
    key = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * keys + key
    d = tl.load(gradient + at, mask=key < keys, other=0.0).to(tl.float32)
    p = tl.load(probabilities + at, mask=key < keys, other=0.0).to(tl.float32)
    d = (d - tl.sum(d * p, 0)) * p * scale
    tl.store(gradient + at, d.to(gradient.dtype.element_ty), mask=key < keys)


def _settings(keys: int) -> dict[str, Any]:
    block = triton.next_power_of_2(keys)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // _A_WARP))}


def masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, masked: float) -> Tensor:
    """softmax(scale * scores) [B, Z, queries, keys] over the last dim, contiguous; a score whose ``mask`` is
    True counts as ``masked``."""
    _, heads, queries, keys = scores.shape
    out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    bytes_of_mask = None if mask is None else mask.expand(scores.shape).view(torch.uint8)
    strides = (0,) * 4 if bytes_of_mask is None else bytes_of_mask.stride()
    _softmax[(out.numel() // keys,)](
        scores, bytes_of_mask, out, heads, queries, keys, scale, *scores.stride(), *strides,
        MASKED=masked, CAUSAL=causal, **_settings(keys),
    )  # fmt: skip
    return out


def masked_softmax_backward_(gradient: Tensor, probabilities: Tensor, scale: float) -> None:
    """Overwrite the probabilities' gradient [..., keys], contiguous, with the gradient of the scores."""
    keys = gradient.shape[-1]
    _gradient[(gradient.numel() // keys,)](gradient, probabilities, keys, scale, **_settings(keys))
