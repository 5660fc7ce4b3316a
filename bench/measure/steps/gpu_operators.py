"""Functions of torch as a GPU runs them: attention, RMSNorm and dropout by the fused operators of CUDA.

For the CPU's tensors torch calls other operators. No list of what a selective checkpoint keeps names the
CPU's attention, torch's context parallelism does not turn it into a ring, and RMSNorm and dropout keep more
tensors for backward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from spbench.bench.measure.trace.torch_internals import attention_order, below_autograd

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


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
        with below_autograd():
            y, rstd = _ATEN._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        d_x, d_weight = _ATEN._fused_rms_norm_backward(*gradients, x, ctx.shape, rstd, weight, wanted)
        return d_x, None, d_weight, None


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The output of rms_norm, whose arguments these are; torch fuses it only in one precision."""
    if weight is not None and weight.dtype != x.dtype:
        return _ATEN._fused_rms_norm(x, shape, weight, eps)[0]
    return _RmsNorm.apply(x, shape, weight, eps)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _ATEN.native_dropout(x, p, True)[0] if train and p > 0 else x


@contextmanager
def operators_of_gpus() -> Iterator[None]:
    """Within the context, functions of the CPU's tensors call CUDA's operators, which only fake tensors can
    take. torch's dispatcher calls them, because a mode of torch's functions does not see what runs within
    other functions of torch, for example a recomputation in backward."""
    functions = {"scaled_dot_product_attention": _attention, "rms_norm": _rms_norm, "dropout": _dropout}
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in functions.items():
            for key in ("AutogradCPU", "CPU"):
                library.impl(name, function, key)
        yield
    finally:
        library._destroy()
