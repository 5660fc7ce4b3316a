"""Matrix products by the library that runs them, and products that are added to what is there.

A library has a workspace of its own, which its first product allocates; so TransformerEngine's products are
operators of their own beside torch's. Where gradient accumulation is fused (Megatron-LM's
--gradient-accumulation-fusion), the gradient of a weight is added to a float32 buffer by the product itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: the operators that torch runs through cuBLAS handles of its own, whose workspaces its allocator holds
TORCH_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "strided_bmm", "accumulate_mm_"})
#: those of TransformerEngine, which all use one workspace
TRANSFORMER_ENGINE_PRODUCTS = frozenset({"te_mm", "te_accumulate_mm_"})


@torch.library.custom_op("spbench::te_mm", mutates_args=())
def te_mm(a: Tensor, b: Tensor) -> Tensor:
    """a [..., k] times b [k, n] -> [..., n]."""
    return torch.matmul(a, b).contiguous()


@te_mm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[1])


def _accumulate(into: Tensor, a: Tensor, b: Tensor) -> None:
    into.addmm_(a.to(into.dtype), b.to(into.dtype))


@torch.library.custom_op("spbench::accumulate_mm_", mutates_args={"into"})
def accumulate_mm_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [m, k] times b [k, n] to ``into`` [m, n], in the precision of ``into``."""
    _accumulate(into, a, b)


@torch.library.custom_op("spbench::te_accumulate_mm_", mutates_args={"into"})
def te_accumulate_mm_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """As :func:`accumulate_mm_`, by TransformerEngine."""
    _accumulate(into, a, b)


@accumulate_mm_.register_fake
def _(into: Tensor, a: Tensor, b: Tensor) -> None:
    return None


@te_accumulate_mm_.register_fake
def _(into: Tensor, a: Tensor, b: Tensor) -> None:
    return None


@torch.library.custom_op("spbench::strided_bmm", mutates_args=())
def _strided_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.matmul(a, b).mul_(scale).contiguous()


@_strided_bmm.register_fake
def _(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


class _StridedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return _strided_bmm(a, b, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        return _strided_bmm(gradient, b.mT, ctx.scale), _strided_bmm(a.mT, gradient, ctx.scale), None


def strided_product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale a [B, Z, m, k] b [B, Z, k, n] -> a contiguous [B, Z, m, n]; a and b may be views, which are kept
    and not copied, as a product of [L, B, H] hidden states has its batches at one distance."""
    result: Tensor = _StridedProduct.apply(a, b, scale)
    return result
