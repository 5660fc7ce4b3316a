"""A module ``flash_attn`` for processes that compute on the CPU, for which FlashAttention has no kernels.

The module has the functions that ring-flash-attn and yunchang import from flash-attn, made of the operators
of :mod:`spbench.impls.kernels.flash_attention`, which are torch's CPU flash operators. So a peer on the CPU
runs its own communication and bookkeeping around the kernels that spbench's strategies call. A user's step
calls ``flash_attn_func`` and ``flash_attn_varlen_func``.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward

#: the version of flash-attn whose functions the module imitates
VERSION = "2.8.3"


def install() -> None:
    """Make this stand-in importable as ``flash_attn`` in this process, which computes on the CPU.

    Call this function before the peers are imported, because they look for ``flash_attn`` then.
    """
    if "flash_attn" in sys.modules:
        return
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(
        _flash_attn_forward=_forward,
        _flash_attn_backward=_backward,
        # the functions for sequences of several lengths in one batch, which no peer calls
        _flash_attn_varlen_forward=None,
        _flash_attn_varlen_backward=None,
    )
    package = ModuleType("flash_attn")
    package.__path__ = []
    package.__spec__ = importlib.util.spec_from_loader("flash_attn", None, is_package=True)
    functions = {"flash_attn_func": _whole, "flash_attn_varlen_func": _of_lengths}
    vars(package).update(__version__=VERSION, flash_attn_interface=interface, **functions)
    vars(interface).update(functions)
    # ring_flash_attn's adapter to Hugging Face's models imports transformers
    adapters = ModuleType("ring_flash_attn.adapters")
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    for module in (package, interface, adapters):
        sys.modules[module.__name__] = module


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, **_: Any
) -> tuple[Tensor, Tensor, None, None]:
    """Attention: q [B, M, Z, A], k, v [B, L, G, A] -> (o [B, M, Z, A], lse [B, Z, M], None, None)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = flash_attention(q, k, v, softmax_scale, causal)
    return o.transpose(1, 2), lse, None, None


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v into ``dq``, ``dk`` and ``dv``, of the same shapes."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    gradients = flash_attention_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for into, gradient in zip((dq, dk, dv), gradients, strict=True):
        into.copy_(gradient.transpose(1, 2))


def _whole(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), **_: Any,
) -> Tensor:  # fmt: skip
    """Attention with autograd: q [B, L, Z, A], k, v [B, L, G, A] -> [B, L, Z, A]."""
    if tuple(window_size) != (-1, -1):
        raise NotImplementedError(
            "flash-attn's stand-in has no window_size; leave it out, or install flash-attn"
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = k.shape[1] < q.shape[1]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        o = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=grouped
        )
    return o.transpose(1, 2)


def _of_lengths(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *args: Any, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention within sequences one after another: q [T, Z, A], k, v [S, G, A] -> [T, Z, A]. Fake tensors
    have no lengths, so in a trace all sequences but the last have the largest length."""

    def lengths(ends: Tensor, whole: int, largest: int) -> list[int]:
        if not isinstance(ends, FakeTensor):
            return [int(n) for n in ends.diff()]
        return [min(largest, whole - begin) for begin in range(0, whole, largest)]

    parts = zip(
        q.split(lengths(cu_seqlens_q, len(q), max_seqlen_q)),
        *(x.split(lengths(cu_seqlens_k, len(x), max_seqlen_k)) for x in (k, v)),
        strict=True,
    )
    return torch.cat([_whole(*(x.unsqueeze(0) for x in part), *args, **options)[0] for part in parts])
