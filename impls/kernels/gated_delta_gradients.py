"""The gated delta rule's backward operators, in the letters of :mod:`spbench.impls.kernels.gated_delta`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spbench.impls.kernels.gated_delta_operators import (
    OPS,
    blocks_of,
    count_products,
    of_heads,
    room_for_carry,
    room_for_states,
    scale,
    split,
)
from spbench.impls.kernels.operator import operator
from spbench.impls.kernels.recurrence_blocks import BlockDecay


@operator("spbench::gated_delta_own_gradients", fake=lambda q, k, d_o, *_: d_o.new_empty(d_o.shape))
def own_gradients(q: Tensor, k: Tensor, d_o: Tensor, sums: Tensor, starts: Sequence[int]) -> Tensor:
    """The part of the gradient of V' [B, L, Z, A] that comes from outputs of the same block."""
    blocks = blocks_of(q, starts)
    queries, keys, d_outputs = split(blocks, d_o.shape[2], q, k, d_o)
    products = scale(q.shape[-1]) * BlockDecay(sums, blocks).products(queries, keys)
    return blocks.back(products.mT @ d_outputs, d_o)


@operator(
    "spbench::gated_delta_state_gradients",
    fake=lambda q, k, w, sums, d_o, *rest: (room_for_states(q, d_o, rest[-1]), d_o.new_empty(d_o.shape)),
)
def state_gradients(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    sums: Tensor,
    d_o: Tensor,
    d_written: Tensor,
    d_final: Tensor | None,
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The gradient of the state after each block [B, Z, C, D, A] in q's dtype, and the gradient of V'
    [B, L, Z, A]; ``d_written`` is the latter's part from :func:`own_gradients`."""
    blocks = blocks_of(q, starts)
    queries, keys, w, d_o, own = split(blocks, d_o.shape[2], q, k, w, d_o, d_written)
    decay = BlockDecay(sums, blocks)
    reads, writes = scale(q.shape[-1]) * decay.from_start * queries, decay.to_end * keys
    state = keys.new_zeros(*keys.shape[:2], keys.shape[-1], own.shape[-1]) if d_final is None else d_final
    after, whole = [], []
    for c in reversed(range(keys.shape[2])):
        after.append(state)
        whole.append(own[:, :, c] + writes[:, :, c] @ state)
        state = decay.across[:, :, c] * state + reads[:, :, c].mT @ d_o[:, :, c] - w[:, :, c].mT @ whole[-1]
    return torch.stack(after[::-1], 2).to(q.dtype), blocks.back(torch.stack(whole[::-1], 2), d_written)


@operator(
    "spbench::gated_delta_gradient_carry", fake=lambda q, k, w, sums, d_o, *_: room_for_carry(k, d_o, sums)
)
def gradient_carry(
    q: Tensor, k: Tensor, w: Tensor, sums: Tensor, d_o: Tensor, d_written: Tensor, starts: Sequence[int]
) -> Tensor:
    """The map [B, Z, D (A + D)] from the last state's gradient to the first state's gradient."""
    blocks = blocks_of(q, starts)
    queries, keys, w, d_o, own = split(blocks, d_o.shape[2], q, k, w, d_o, d_written)
    decay = BlockDecay(sums, blocks)
    reads, writes = scale(q.shape[-1]) * decay.from_start * queries, decay.to_end * keys
    m = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device).expand(*keys.shape[:2], -1, -1)
    a = own.shape[-1]
    both = torch.cat((keys.new_zeros(*keys.shape[:2], keys.shape[-1], a), m), -1)
    for c in reversed(range(keys.shape[2])):
        whole = writes[:, :, c] @ both
        whole[..., :a] += own[:, :, c]
        both = decay.across[:, :, c] * both - w[:, :, c].mT @ whole
        both[..., :a] += reads[:, :, c].mT @ d_o[:, :, c]
    return both.flatten(2)


@operator(
    "spbench::gated_delta_read_gradients",
    fake=lambda q, k, written, sums, *_: (
        *(of_heads(k, written) for _ in range(3)),
        sums.new_empty(sums.shape),
    ),
)
def read_gradients(
    q: Tensor,
    k: Tensor,
    written: Tensor,
    sums: Tensor,
    states: Tensor,
    d_o: Tensor,
    d_written: Tensor,
    d_states: Tensor,
    starts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and W [B, L, Z, D] and of the sums, without the parts that come through
    W and U (:func:`wy_gradients`)."""
    heads, blocks = written.shape[2], blocks_of(q, starts)
    queries, keys, values, d_outputs, d_values = split(blocks, heads, q, k, written, d_o, d_written)
    decay, factor = BlockDecay(sums, blocks), scale(q.shape[-1])
    before, d_after = states.to(keys.dtype), d_states.to(keys.dtype)
    d_q, d_k = decay.product_gradients(factor * (d_outputs @ values.mT), queries, keys)
    d_kept = decay.to_end * (values @ d_after.mT)
    d_q, d_k = d_q + factor * decay.from_start * (d_outputs @ before.mT), d_k + d_kept
    # each key is divided by its decay from the start; what lasts to a block's end is multiplied by the last
    d_sums = decay.of_gates(queries * d_q - keys * d_k)
    of_ends = (keys * d_kept).sum(-2) + (decay.across * before * d_after).sum(-1)
    decay.add_at_ends(d_sums, decay.of_gates(of_ends))
    like = of_heads(k, written)
    return (
        blocks.back(d_q, like),
        blocks.back(d_k, like),
        blocks.back(-d_values @ before.mT, like),
        blocks.back(d_sums, sums),
    )


@operator(
    "spbench::gated_delta_wy_gradients",
    fake=lambda k, v, sums, b, *_: (
        of_heads(k, v),
        v.new_empty(v.shape),
        sums.new_empty(sums.shape),
        b.new_empty(b.shape),
    ),
)
def wy_gradients(
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    b: Tensor,
    inverse: Tensor,
    d_w: Tensor,
    d_u: Tensor,
    starts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of the gradients of k [B, L, Z, D], v, the sums and b that come through W and U."""
    blocks = blocks_of(k, starts)
    keys, values, strength, t, d_w, d_u = split(blocks, v.shape[2], k, v, b, inverse, d_w, d_u)
    decay = BlockDecay(sums, blocks)
    strong, started = strength.unsqueeze(-1), decay.from_start * keys
    d_t = d_w @ (strong * started).mT + d_u @ (strong * values).mT
    d_started, d_values = t.mT @ d_w, t.mT @ d_u  # but for b
    d_overlaps = -(t.mT @ d_t @ t.mT).tril(-1)
    d_b = (values * d_values).sum(-1) + (started * d_started).sum(-1)
    d_b += (d_overlaps * decay.products(keys, keys)).sum(-1)
    d_later, d_earlier = decay.product_gradients(strong * d_overlaps, keys, keys)
    d_later += strong * decay.from_start * d_started
    d_sums, d_k = decay.of_gates(keys * (d_later - d_earlier)), d_later + d_earlier
    return (
        blocks.back(d_k, of_heads(k, v)),
        blocks.back(strong * d_values, v),
        blocks.back(d_sums, sums),
        blocks.back(d_b, b),
    )


count_products(OPS.gated_delta_own_gradients, 2, lambda n, d, a: n * (d + a))
count_products(OPS.gated_delta_state_gradients, 4, lambda n, d, a: 3 * d * a)
count_products(OPS.gated_delta_gradient_carry, 4, lambda n, d, a: 3 * d * a + d * d + d**3 // n)
count_products(OPS.gated_delta_read_gradients, 2, lambda n, d, a: n * (3 * d + a) + 3 * d * a)
count_products(OPS.gated_delta_wy_gradients, 1, lambda n, d, a: n * (5 * d + 2 * a + 2 * n))
