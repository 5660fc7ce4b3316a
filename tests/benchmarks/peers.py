"""The public ring and Ulysses attentions that ours are timed beside, on CPU: yunchang and ring-flash-attn.

Both are written for FlashAttention's CUDA kernels, in float16 and bfloat16. Here they find in their place
torch's CPU flash operators, which our own strategies call too: :func:`install` provides a module
``flash_attn`` with the functions that they import. Call it in a process that is used for nothing else.

In float32 both packages, as published, give wrong gradients: ``buffer.to(torch.float32)`` is then the buffer
itself, which the next block overwrites while the sum that it has become travels on; and the contiguous ring
returns its gradient of q in bfloat16. A mended copy of such a module differs from the published text in these
two expressions only (:data:`MENDS`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

#: what is replaced in the text of a peer's module, and by what
MENDS = ((".to(torch.float32)", ".to(torch.float32, copy=True)"), ("dq.to(torch.bfloat16)", "dq.to(q.dtype)"))
#: q, k, v of this rank [B, L/N, Z, A] -> output [B, L/N, Z, A]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """An attention of another package.

    Attributes:
        placement: the algorithm: a placement of :class:`RingAttention`, or "ulysses".
        package, module, function: where it is found, and what it is called there.
    """

    placement: str
    package: str
    module: str
    function: str

    def attend(self, group: dist.ProcessGroup, mended: bool) -> Attend:
        """The causal attention over a group, of the module as published or of its mended copy."""
        module = (_mended if mended else importlib.import_module)(self.module)
        found = getattr(module, self.function)
        if isinstance(found, type):
            layer = found(group)
            return lambda q, k, v: layer(q, k, v, causal=True)
        return lambda q, k, v: found(q, k, v, causal=True, group=group)


PEERS = (
    Peer("contiguous", "ring-flash-attn", "ring_flash_attn.ring_flash_attn", "ring_flash_attn_func"),
    Peer("contiguous", "yunchang", "yunchang.ring.ring_flash_attn", "ring_flash_attn_func"),
    Peer(
        "zigzag", "ring-flash-attn", "ring_flash_attn.zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func"
    ),
    Peer("zigzag", "yunchang", "yunchang.ring.zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func"),
    Peer("striped", "ring-flash-attn", "ring_flash_attn.stripe_flash_attn", "stripe_flash_attn_func"),
    Peer("striped", "yunchang", "yunchang.ring.stripe_flash_attn", "stripe_flash_attn_func"),
    Peer("ulysses", "yunchang", "yunchang.ulysses.attn_layer", "UlyssesAttention"),
)


def _mended(name: str) -> ModuleType:
    """The module ``name`` made again from its text after MENDS."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    module = importlib.util.module_from_spec(spec)
    with open(spec.origin) as file:
        source = file.read()
    for published, replacement in MENDS:
        source = source.replace(published, replacement)
    exec(compile(source, f"{spec.origin} (mended)", "exec"), module.__dict__)
    return module


def available() -> Iterator[str]:
    """The names of the packages that are installed here."""
    for package in dict.fromkeys(peer.package for peer in PEERS):
        if importlib.util.find_spec(package.replace("-", "_")) is not None:
            yield package


def install() -> None:
    """Let the peers import in this process, with torch's CPU operators as their FlashAttention."""
    if "flash_attn" in sys.modules:
        return
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(
        _flash_attn_forward=_forward,
        _flash_attn_backward=_backward,
        # of sequences of several lengths in one batch, which nothing here asks for
        _flash_attn_varlen_forward=None,
        _flash_attn_varlen_backward=None,
    )
    package = ModuleType("flash_attn")
    package.__path__ = []
    vars(package).update(__version__="2.8.3", flash_attn_interface=interface, flash_attn_func=_whole)
    # ring_flash_attn's adapter to Hugging Face's models imports transformers
    adapters = ModuleType("ring_flash_attn.adapters")
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    for module in (package, interface, adapters):
        sys.modules[module.__name__] = module


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, **_: Any
) -> tuple[Tensor, Tensor, None, None]:
    """q, k, v [B, M or L, Z, A] -> (o [B, M, Z, A], lse [B, Z, M])."""
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, v)), dropout_p, causal, scale=softmax_scale
    )
    return o.transpose(1, 2), lse, None, None


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> None:  # fmt: skip
    """Writes the gradients into ``dq``, ``dk`` and ``dv``."""
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out)),
        softmax_lse,
        dropout_p,
        causal,
        scale=softmax_scale,
    )
    for into, gradient in zip((dq, dk, dv), gradients, strict=True):
        into.copy_(gradient.transpose(1, 2))


def _whole(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **_: Any) -> Tensor:
    """Attention with autograd: q, k, v [B, L, Z, A] -> [B, L, Z, A]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)
