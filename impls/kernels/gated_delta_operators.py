"""The operators of the gated delta rule's forward pass, and the helpers that forward and backward share.
:mod:`spbench.impls.kernels.gated_delta` explains the letters W, U, V', T, S."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.kernels import recurrence_blocks
from spbench.impls.kernels.operator import operator
from spbench.impls.kernels.recurrence_blocks import BlockDecay, Blocks

#: positions in a block, as in fla
BLOCK = 64

OPS = torch.ops.spbench


def block_of(x: Tensor) -> int:
    """The number of positions in a block of x [B, L, ...]: BLOCK, or L if L is less."""
    return min(BLOCK, x.shape[1])


def blocks_of(x: Tensor, starts: Sequence[int]) -> Blocks:
    """The blocks of the positions of x [B, L, ...], in which documents begin at ``starts``."""
    return Blocks(x.shape[1], block_of(x), starts, anew=True)


def split(blocks: Blocks, heads: int, *tensors: Tensor) -> list[Tensor]:
    """Returns each tensor [B, L, G or Z, ...] cut into C blocks, as [B, heads, C, block, ...]."""
    return [blocks.of(x, heads) for x in tensors]


def scale(d: int) -> float:
    """The factor of outputs for queries with D features, D**-0.5."""
    return d**-0.5


def _overlaps(keys: Tensor, strength: Tensor, decay: BlockDecay) -> Tensor:
    """The matrix b_i (k_i . decay(j to i) k_j) where j < i, else 0 [B, Z, C, block, block]."""
    return (strength.unsqueeze(-1) * decay.products(keys, keys)).tril(-1)


@operator("spbench::gated_delta_inverse", fake=lambda k, sums, b, starts: _rows(k, sums))
def inverse(k: Tensor, sums: Tensor, b: Tensor, starts: Sequence[int]) -> Tensor:
    """The rows of T [B, L, Z, block], one for each position and head."""
    blocks = blocks_of(k, starts)
    keys, strength = split(blocks, sums.shape[2], k, b)
    identity = torch.eye(keys.shape[-2], dtype=keys.dtype, device=keys.device)
    system = identity + _overlaps(keys, strength, BlockDecay(sums, blocks))
    inverse = torch.linalg.solve_triangular(
        system, identity.expand_as(system), upper=False, unitriangular=True
    )
    return blocks.back(inverse, _rows(k, sums))


@operator("spbench::gated_delta_wy", fake=lambda k, v, *_: (of_heads(k, v), v.new_empty(v.shape)))
def wy(
    k: Tensor, v: Tensor, sums: Tensor, b: Tensor, inverse: Tensor, starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """W [B, L, Z, D] and U [B, L, Z, A]."""
    blocks = blocks_of(k, starts)
    keys, values, strength, t = split(blocks, v.shape[2], k, v, b, inverse)
    strong = strength.unsqueeze(-1)
    w, u = t @ (strong * BlockDecay(sums, blocks).from_start * keys), t @ (strong * values)
    return blocks.back(w, of_heads(k, v)), blocks.back(u, v)


@operator(
    "spbench::gated_delta_states",
    fake=lambda k, w, u, sums, initial, starts: (room_for_states(k, u, starts), u.new_empty(u.shape)),
)
def states(
    k: Tensor, w: Tensor, u: Tensor, sums: Tensor, initial: Tensor | None, starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The state before each block [B, Z, C, D, A], in the dtype of k, and V' [B, L, Z, A]."""
    blocks = blocks_of(k, starts)
    (keys, w, values), decay = split(blocks, u.shape[2], k, w, u), BlockDecay(sums, blocks)
    state = keys.new_zeros(*keys.shape[:2], keys.shape[-1], values.shape[-1]) if initial is None else initial
    before, written = [], []
    for c in range(keys.shape[2]):
        before.append(state)
        written.append(values[:, :, c] - w[:, :, c] @ state)
        state = decay.across[:, :, c] * state + (decay.to_end * keys)[:, :, c].mT @ written[-1]
    return torch.stack(before, 2).to(k.dtype), blocks.back(torch.stack(written, 2), u)


@operator("spbench::gated_delta_carry", fake=lambda k, w, u, sums, starts: room_for_carry(k, u, sums))
def carry(k: Tensor, w: Tensor, u: Tensor, sums: Tensor, starts: Sequence[int]) -> Tensor:
    """The map S -> M S + U of all blocks [B, Z, D (A + D)]: A numbers of U and D of M for each row of S."""
    blocks = blocks_of(k, starts)
    (keys, w, values), decay = split(blocks, u.shape[2], k, w, u), BlockDecay(sums, blocks)
    m = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device).expand(*keys.shape[:2], -1, -1)
    state = keys.new_zeros(*keys.shape[:2], keys.shape[-1], values.shape[-1])
    both = torch.cat((state, m), -1)
    for c in range(keys.shape[2]):
        written = -w[:, :, c] @ both
        written[..., : values.shape[-1]] += values[:, :, c]
        both = decay.across[:, :, c] * both + (decay.to_end * keys)[:, :, c].mT @ written
    return both.flatten(2)


@operator("spbench::gated_delta_output", fake=lambda q, k, written, *_: written.new_empty(written.shape))
def output(
    q: Tensor, k: Tensor, written: Tensor, sums: Tensor, states: Tensor, starts: Sequence[int]
) -> Tensor:
    """o [B, L, Z, A] from V' (``written``) and the state before each block [B, Z, C, D, A]."""
    blocks = blocks_of(q, starts)
    (queries, keys, values), decay = split(blocks, written.shape[2], q, k, written), BlockDecay(sums, blocks)
    o = decay.from_start * queries @ states.to(queries.dtype) + decay.products(queries, keys) @ values
    return blocks.back(scale(q.shape[-1]) * o, written)


def of_heads(k: Tensor, v: Tensor) -> Tensor:
    """An empty tensor [B, L, Z, D] for keys, one head for each head of v [B, L, Z, A]."""
    return k.new_empty(*v.shape[:3], k.shape[-1])


def _rows(k: Tensor, sums: Tensor) -> Tensor:
    """An empty tensor for T [B, L, Z, block]."""
    return k.new_empty(*sums.shape[:3], block_of(k))


def room_for_states(k: Tensor, v: Tensor, starts: Sequence[int]) -> Tensor:
    """An empty tensor for the state before each block [B, Z, C, D, A]."""
    return k.new_empty(len(v), v.shape[2], blocks_of(v, starts).count, k.shape[-1], v.shape[-1])


def room_for_carry(k: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    """An empty tensor for the map of all blocks [B, Z, D (A + D)]."""
    return sums.new_empty(len(v), v.shape[2], k.shape[-1] * (v.shape[-1] + k.shape[-1]))


count_products = partial(recurrence_blocks.count_products, BLOCK)
count_products(OPS.gated_delta_wy, 1, lambda n, d, a: n * (d + a))
count_products(OPS.gated_delta_states, 2, lambda n, d, a: 2 * d * a)
# the transition of each block, and its matmul with the transitions of earlier blocks
count_products(OPS.gated_delta_carry, 2, lambda n, d, a: 2 * d * a + d * d + d**3 // n)
count_products(OPS.gated_delta_output, 2, lambda n, d, a: n * (d + a) + d * a)


@register_flop_formula(OPS.gated_delta_inverse)
def _inverse_flops(k: Sequence[int], sums: Sequence[int], *__: Any, **___: Any) -> int:
    batch, length, heads, *_ = sums
    block = min(BLOCK, length)
    return 2 * batch * length * heads * block * (k[-1] + block // 3)
