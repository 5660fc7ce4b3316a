"""Scale, mask and softmax of attention scores, fused (Megatron-LM's scaled_masked_softmax) or plain."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels.operator import differentiable, operator

#: the value of a masked score; Megatron-LM's and BERT's value, finite so that a row with no key stays finite
MASKED_SCORE = -10000.0
#: the most keys of a row for the Triton kernels; longer rows are computed step by step in float32
LONGEST_ROW = 2**15


def _plain(scores: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    scores = scores * scale
    if mask is not None:
        scores = scores.masked_fill(mask, MASKED_SCORE)
    if causal:
        scores = scores.masked_fill(_or_causal(None, scores), -torch.inf)
    return torch.softmax(scores, -1)


def _has_kernel(scores: Tensor, *_: Any) -> bool:
    """Whether the Triton kernels take scores [..., keys] of this dtype and length on a GPU."""
    keys = scores.shape[-1]
    return scores.dtype != torch.float64 and 0 < keys <= LONGEST_ROW and find_spec("triton") is not None


@operator("spbench::masked_softmax", fake=lambda scores, mask, scale, causal: scores.new_empty(scores.shape))
def _masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    working = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    return _plain(working, mask, scale, causal).to(scores.dtype)


@_masked_softmax.register_kernel("cuda", _has_kernel)
def _(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    kernels = import_module("spbench.impls.kernels.softmax_triton")
    result: Tensor = kernels.masked_softmax(scores, mask, scale, causal, MASKED_SCORE)
    return result


@operator("spbench::masked_softmax_backward_", mutates_args={"gradient"})
def _masked_softmax_backward_(gradient: Tensor, probabilities: Tensor, scale: float) -> None:
    working = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
    result = torch._softmax_backward_data(gradient.to(working), probabilities.to(working), -1, working)
    gradient.copy_(result.mul_(scale))


@_masked_softmax_backward_.register_kernel("cuda", _has_kernel)
def _(gradient: Tensor, probabilities: Tensor, scale: float) -> None:
    kernels = import_module("spbench.impls.kernels.softmax_triton")
    kernels.masked_softmax_backward_(gradient, probabilities, scale)


def _softmax_gradient(gradient: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    # only autograd's function refers to the gradient that arrives (a matmul or a dropout made it),
    # so the result overwrites it, as the CUDA kernel does
    gradient = gradient.contiguous()
    _masked_softmax_backward_(gradient, probabilities, scale)
    return gradient


_MASKED_SOFTMAX = differentiable(
    _masked_softmax, _softmax_gradient, lambda scores, mask, scale, causal, y: (y, scale)
)

#: torch.softmax over the last dim, which keeps its input next to its result, as PyTorch 1.8 did
_SOFTMAX_KEEPING_INPUT = differentiable(
    lambda scores: torch.softmax(scores, -1),
    lambda d_y, _, y: torch._softmax_backward_data(d_y, y, -1, y.dtype),
    lambda scores, y: (scores, y),
)


def megatron_fuses(batch_heads: int, queries: int, keys: int) -> bool:
    """Whether Megatron-LM's scaled_masked_softmax kernel of 2021 takes these scores (its fused_softmax.py):
    16 < keys <= 2048, and both the queries and batch x heads a multiple of 4."""
    return 16 < keys <= 2048 and queries % 4 == 0 and batch_heads % 4 == 0


def masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, way: str) -> Tensor:
    """softmax(scale * scores) over the last dim, for scores [B, Z, queries, keys].

    ``mask`` broadcasts to the scores and is True where the score becomes -10000. ``way`` is one of:

    - "fused": keeps only the result, without intermediates (2 bytes a score in half precision). Backward has
      no mask, like Megatron-LM's kernel. It is exact where a masked score's probability is 0, but not in a
      row without any key, so the gradient of such a row must not matter.
    - "plain": torch's own operators, which compute half precisions in float32 (keeps 4 + 2 bytes a score).
    - "megatron": "fused" where :func:`megatron_fuses`, else Megatron-LM's fallback in float32 on PyTorch
      1.8, whose softmax kept its input next to its result (4 + 4 + 2 bytes a score).
    """
    batch, heads, queries, keys = scores.shape
    if way == "fused" or (way == "megatron" and megatron_fuses(batch * heads, queries, keys)):
        return _MASKED_SOFTMAX(scores, mask, scale, False)
    working = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    if way == "plain":
        return _plain(working, mask, scale).to(scores.dtype)
    working = working * scale
    if mask is not None:
        working = working.masked_fill_(mask, MASKED_SCORE)
    return _SOFTMAX_KEEPING_INPUT(working).to(scores.dtype)


class _SoftmaxInFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
        # a copy, scaled and masked in place, and its softmax
        working = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        working = working * 1.0
        probabilities = torch.softmax(working.masked_fill_(_or_causal(mask, scores), MASKED_SCORE), -1)
        ctx.save_for_backward(probabilities)
        return probabilities.to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        d_scores = torch._softmax_backward_data(
            gradient.to(probabilities.dtype), probabilities, -1, probabilities.dtype
        )
        return d_scores.to(gradient.dtype), None


def _or_causal(mask: Tensor | None, scores: Tensor) -> Tensor:
    """The mask if there is one, else the causal mask [L, L] of scores [..., L, L] (True: not attended)."""
    if mask is not None:
        return mask
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)


def softmax_of_scores(scores: Tensor, mask: Tensor | None, way: str) -> Tensor:
    """softmax over the last dim of scaled scores [B, Z, L, L] under a mask (True: not attended), or, without
    one, the causal mask, under which query i sees keys j <= i. Ways:

    - "fused": keeps only the result (Megatron-LM's scaled_masked_softmax and
      scaled_upper_triang_masked_softmax).
    - "in_float32": scales a float32 copy, masks the copy in place and keeps its softmax in float32, as
      Megatron-LM does without fused kernels where scores are scaled by the layer (--no-masked-softmax-fusion,
      --apply-query-key-layer-scaling).
    - "plain": torch's own operators, which keep more tensors.
    """
    if way == "fused":
        result: Tensor = _MASKED_SOFTMAX(scores, mask, 1.0, mask is None)
        return result
    if way == "in_float32":
        return _SoftmaxInFloat32.apply(scores, mask)
    working = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    return _plain(working, mask, 1.0, mask is None).to(scores.dtype)
