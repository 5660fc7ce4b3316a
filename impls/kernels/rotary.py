"""RoPE (arXiv 2104.09864) as one operator, which keeps only the angles (TransformerEngine's fused RoPE).

For latent attention, RoPE as Megatron-Core fuses it (core/fusions/fused_mla_yarn_rope_apply.py): one kernel
turns queries in place, and another makes keys and values from their projection and the key features that all
heads share.

Shape letters: B batch, L sequence, Z heads; of a head, N features without a position, R features with a
position, A features of a value.
"""

from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels.operator import differentiable, operator


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (i, i + A/2) of x [..., L, A] turned by cos, sin [L, A/2], by torch's own operators."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotated_by_angles(x: Tensor, angles: Tensor) -> Tensor:
    """x [..., L, A] turned by angles [L, A], by torch's operators as in Megatron-Core without fusion
    (core/models/common/embeddings/rope_utils.py); each call makes and keeps its own cos and sin [L, A]."""
    return rotated_by_halves(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def rotated_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As :func:`rotated`, but for cos and sin [L, A] with two equal halves, as in Hugging Face's models."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _turned(x: Tensor, angles: Tensor, inverse: bool) -> Tensor:
    """x [..., L, R] turned by angles [L, R], or back if ``inverse``."""
    half = angles[..., : angles.shape[-1] // 2]
    cos, sin = half.cos().to(x.dtype), half.sin().to(x.dtype)
    return rotated(x, cos, -sin if inverse else sin)


@operator("spbench::rotary", fake=lambda x, angles, inverse: x.new_empty(x.shape))
def _rotary(x: Tensor, angles: Tensor, inverse: bool) -> Tensor:
    return _turned(x, angles, inverse).contiguous()


_ROTARY = differentiable(
    lambda x, angles: _rotary(x, angles, False),
    lambda d_y, angles: _rotary(d_y, angles, True),
    lambda x, angles, y: (angles,),
)


def fused_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """x [..., L, A], turned and contiguous. The angles [L, A], in at least float32 as in libraries, have two
    equal halves."""
    return _ROTARY(x, angles)


@operator("spbench::rotary_", mutates_args={"x"})
def _rotary_(x: Tensor, angles: Tensor, inverse: bool) -> None:
    x.copy_(_turned(x.transpose(1, 2), angles, inverse).transpose(1, 2))


class _TurnedQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, angles: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.heads = heads
        _rotary_(q.unflatten(-1, (heads, -1))[..., -angles.shape[-1] :], angles, False)
        ctx.mark_dirty(q)
        return q

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (angles,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        _rotary_(gradient.unflatten(-1, (ctx.heads, -1))[..., -angles.shape[-1] :], angles, True)
        return gradient, None, None


def turned_queries(q: Tensor, angles: Tensor, heads: int) -> Tensor:
    """Returns q [B, L, Z (N + R)] after turning the last R features of each head in place by angles [L, R].
    Nothing else may read q; backward turns the gradient back in place."""
    result: Tensor = _TurnedQueries.apply(q, angles, heads)
    return result


@operator("spbench::latent_keys_values")
def _keys_values(kv: Tensor, shared: Tensor, angles: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    keys, values = kv.unflatten(-1, (heads, -1)).split([size, kv.shape[-1] // heads - size], -1)
    turned = _turned(shared, angles, False).unsqueeze(2).expand(-1, -1, heads, -1)
    return torch.cat((keys, turned), -1), values.clone(memory_format=torch.contiguous_format)


@_keys_values.register_fake
def _(kv: Tensor, shared: Tensor, angles: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    batch, length, features = kv.shape
    k = kv.new_empty(batch, length, heads, size + shared.shape[-1])
    return k, kv.new_empty(batch, length, heads, features // heads - size)


@operator("spbench::latent_keys_values_backward")
def _keys_values_backward(d_k: Tensor, d_v: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    shared = angles.shape[-1]
    d_kv = torch.cat((d_k[..., :-shared], d_v), -1).flatten(-2)
    return d_kv, _turned(d_k[..., -shared:].sum(2), angles, True)


@_keys_values_backward.register_fake
def _(d_k: Tensor, d_v: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, size = d_k.shape
    shared = angles.shape[-1]
    features = heads * (size - shared + d_v.shape[-1])
    return d_k.new_empty(batch, length, features), d_k.new_empty(batch, length, shared)


_KEYS_VALUES = differentiable(
    _keys_values,
    lambda d_k, d_v, angles: _keys_values_backward(d_k.contiguous(), d_v.contiguous(), angles),
    lambda kv, shared, angles, heads, size, k, v: (angles,),
    results=2,
)


def keys_and_values(
    kv: Tensor, shared: Tensor, angles: Tensor, heads: int, size: int
) -> tuple[Tensor, Tensor]:
    """Keys [B, L, Z, N + R] and values [B, L, Z, A] from their projection [B, L, Z (N + A)] and the
    ``shared`` features [B, L, R] of all heads' keys, turned by angles [L, R]; ``size`` is N."""
    k, v = _KEYS_VALUES(kv, shared, angles, heads, size)
    return k, v
