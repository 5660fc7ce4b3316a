"""Attention as a GPU runs it: torch's scaled_dot_product_attention by the fused operators of CUDA.

For the CPU's tensors torch calls operators of the CPU, which no list of what a selective checkpoint keeps
names, and which torch's context parallelism does not turn into a ring.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from spbench.bench.measure.trace.torch_internals import attention_order

_ATEN = torch.ops.aten
_FUSED = {
    SDPBackend.CUDNN_ATTENTION: _ATEN._scaled_dot_product_cudnn_attention,
    SDPBackend.EFFICIENT_ATTENTION: _ATEN._scaled_dot_product_efficient_attention,
}
#: the largest head size of flash attention and cuDNN
_MOST_FEATURES = 256


def kernel_of(q: Tensor, k: Tensor, v: Tensor, masked: bool, shared: bool) -> SDPBackend:
    """The kernel that torch takes on an NVIDIA GPU, the first in its order that is enabled and takes such
    tensors (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    Args:
        q, k, v: [B, Z, L, A]; k and v may have fewer heads if they are ``shared``.
    """
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= _MOST_FEATURES
    usable = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled()
        and half
        and not masked
        and q.shape[-1] == v.shape[-1],
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled() and half,
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled() and not shared,
        SDPBackend.MATH: True,
    }
    return next(each for each in attention_order() if usable.get(each))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output of scaled_dot_product_attention, whose arguments these are."""
    whole = q.dim() == k.dim() == v.dim() == 4
    shared = whole and enable_gqa and k.shape[1] != q.shape[1]
    kernel = kernel_of(q, k, v, mask is not None, shared) if whole else SDPBackend.MATH
    output: Tensor
    if kernel == SDPBackend.FLASH_ATTENTION:
        output, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)
    elif kernel in _FUSED:
        if mask is not None:
            if mask.dtype == torch.bool:  # the kernels add the mask to the scores
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)
            mask = mask.expand(*q.shape[:3], k.shape[2])
        kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        output, *_ = _FUSED[kernel](q, k, v, mask, kept, dropout, causal, scale=scale)
    else:
        further = {"scale": scale, "enable_gqa": enable_gqa}
        output, *_ = _ATEN._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, **further)
    return output


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """Within the context, scaled_dot_product_attention of the CPU's tensors calls CUDA's operators, which
    only fake tensors can take. torch's dispatcher calls them, because a mode of torch's functions does not
    see what runs within other functions of torch, for example a recomputation in backward."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for key in ("AutogradCPU", "CPU"):
            library.impl("scaled_dot_product_attention", _attention, key)
        yield
    finally:
        library._destroy()
