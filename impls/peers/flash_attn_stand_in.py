"""A module ``flash_attn`` for processes that compute on the CPU, for which FlashAttention has no kernels.

The module has the functions that ring-flash-attn and yunchang import from flash-attn, made of the operators
of :mod:`spbench.impls.kernels.flash_attention`, which are torch's CPU flash operators. So a peer on the CPU
runs its own communication and bookkeeping around the kernels that spbench's strategies call.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

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
    vars(package).update(__version__=VERSION, flash_attn_interface=interface, flash_attn_func=_whole)
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


def _whole(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, causal: bool, **_: Any) -> Tensor:
    """Attention with autograd: q [B, L, Z, A], k, v [B, L, G, A] -> [B, L, Z, A]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = k.shape[1] < q.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=grouped)
    return o.transpose(1, 2)
