"""The gated delta rule (Gated DeltaNet, Yang et al., arXiv 2412.06464, section 3), in blocks, as operators.

    S_t = exp(g_t) (I - b_t k_t^T k_t) S_(t-1) + b_t k_t^T v_t        o_t = q_t S_t / sqrt(D)

A position removes from the state the value that the state holds for the position's key, and writes a new
value. In a block, this is a triangular system of equations in the positions (the WY representation and the UT
transform, section 3.3). With T the inverse of I + the strict lower triangle of b_i (k_i . k_j) decay(j to i):

    W = T (b decay(start to i) K)    U = T (b V)    V' = U - W S    S' = decay S + (decay(i to end) K)^T V'

The operators correspond to fla's kernels (ops/gated_delta_rule, ops/common, ops/cp) and allocate the same
tensors: W, U, V' and the states of blocks, of which none is kept. Forward keeps T, which has a row of one
block for each position and head.

Kimi Delta Attention (KDA, Kimi Linear, arXiv 2510.26692, section 3) has a g for each feature of a key: the
diagonal matrix of exp(g_t) multiplies S before the removal. Then k_i . decay(j to i) k_j is no product of
k_i . k_j and a number, and gates of all features are too large to keep, so backward sums them again (fla's
ops/kda).

Shapes are those of :mod:`spbench.impls.kernels.recurrence`, with C blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from spbench.impls.kernels import gated_delta_operators as operators
from spbench.impls.kernels.gated_delta_operators import OPS, count_products
from spbench.impls.kernels.operator import operator
from spbench.impls.kernels.recurrence import Backward, Forward, InputGradients, Rule
from spbench.impls.kernels.recurrence_blocks import BlockDecay, block_sums


@operator("spbench::gated_delta_own_gradients", fake=lambda q, k, d_o, *_: d_o.new_empty(d_o.shape))
def own_gradients(q: Tensor, k: Tensor, d_o: Tensor, sums: Tensor, starts: Sequence[int]) -> Tensor:
    """The part of the gradient of V' [B, L, Z, A] that comes from outputs of the same block."""
    blocks = operators.blocks_of(q, starts)
    queries, keys, d_outputs = operators.split(blocks, d_o.shape[2], q, k, d_o)
    products = operators.scale(q.shape[-1]) * BlockDecay(sums, blocks).products(queries, keys)
    return blocks.back(products.mT @ d_outputs, d_o)


@operator(
    "spbench::gated_delta_state_gradients",
    fake=lambda q, k, w, sums, d_o, *rest: (
        operators.room_for_states(q, d_o, rest[-1]),
        d_o.new_empty(d_o.shape),
    ),
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
    blocks = operators.blocks_of(q, starts)
    queries, keys, w, d_o, own = operators.split(blocks, d_o.shape[2], q, k, w, d_o, d_written)
    decay = BlockDecay(sums, blocks)
    reads, writes = operators.scale(q.shape[-1]) * decay.from_start * queries, decay.to_end * keys
    state = keys.new_zeros(*keys.shape[:2], keys.shape[-1], own.shape[-1]) if d_final is None else d_final
    after, whole = [], []
    for c in reversed(range(keys.shape[2])):
        after.append(state)
        whole.append(own[:, :, c] + writes[:, :, c] @ state)
        state = decay.across[:, :, c] * state + reads[:, :, c].mT @ d_o[:, :, c] - w[:, :, c].mT @ whole[-1]
    return torch.stack(after[::-1], 2).to(q.dtype), blocks.back(torch.stack(whole[::-1], 2), d_written)


@operator(
    "spbench::gated_delta_gradient_carry",
    fake=lambda q, k, w, sums, d_o, *_: operators.room_for_carry(k, d_o, sums),
)
def gradient_carry(
    q: Tensor, k: Tensor, w: Tensor, sums: Tensor, d_o: Tensor, d_written: Tensor, starts: Sequence[int]
) -> Tensor:
    """The map [B, Z, D (A + D)] from the last state's gradient to the first state's gradient."""
    blocks = operators.blocks_of(q, starts)
    queries, keys, w, d_o, own = operators.split(blocks, d_o.shape[2], q, k, w, d_o, d_written)
    decay = BlockDecay(sums, blocks)
    reads, writes = operators.scale(q.shape[-1]) * decay.from_start * queries, decay.to_end * keys
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
        *(operators.of_heads(k, written) for _ in range(3)),
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
    heads, blocks = written.shape[2], operators.blocks_of(q, starts)
    queries, keys, values, d_outputs, d_values = operators.split(blocks, heads, q, k, written, d_o, d_written)
    decay, factor = BlockDecay(sums, blocks), operators.scale(q.shape[-1])
    before, d_after = states.to(keys.dtype), d_states.to(keys.dtype)
    d_q, d_k = decay.product_gradients(factor * (d_outputs @ values.mT), queries, keys)
    d_kept = decay.to_end * (values @ d_after.mT)
    d_q, d_k = d_q + factor * decay.from_start * (d_outputs @ before.mT), d_k + d_kept
    # each key is divided by its decay from the start; what lasts to a block's end is multiplied by the last
    d_sums = decay.of_gates(queries * d_q - keys * d_k)
    of_ends = (keys * d_kept).sum(-2) + (decay.across * before * d_after).sum(-1)
    decay.add_at_ends(d_sums, decay.of_gates(of_ends))
    like = operators.of_heads(k, written)
    return (
        blocks.back(d_q, like),
        blocks.back(d_k, like),
        blocks.back(-d_values @ before.mT, like),
        blocks.back(d_sums, sums),
    )


@operator(
    "spbench::gated_delta_wy_gradients",
    fake=lambda k, v, sums, b, *_: (
        operators.of_heads(k, v),
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
    blocks = operators.blocks_of(k, starts)
    keys, values, strength, t, d_w, d_u = operators.split(blocks, v.shape[2], k, v, b, inverse, d_w, d_u)
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
        blocks.back(d_k, operators.of_heads(k, v)),
        blocks.back(strong * d_values, v),
        blocks.back(d_sums, sums),
        blocks.back(d_b, b),
    )


count_products(OPS.gated_delta_own_gradients, 2, lambda n, d, a: n * (d + a))
count_products(OPS.gated_delta_state_gradients, 4, lambda n, d, a: 3 * d * a)
count_products(OPS.gated_delta_gradient_carry, 4, lambda n, d, a: 3 * d * a + d * d + d**3 // n)
count_products(OPS.gated_delta_read_gradients, 2, lambda n, d, a: n * (3 * d + a) + 3 * d * a)
count_products(OPS.gated_delta_wy_gradients, 1, lambda n, d, a: n * (5 * d + 2 * a + 2 * n))


class _Forward(Forward):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, starts: list[int]):
        self.q, self.k, self.starts = q, k, starts
        self.sums = block_sums(g, operators.block_of(g), False, starts)
        inverse = operators.inverse(k, self.sums, b, starts)
        self.w, self.u = operators.wy(k, v, self.sums, b, inverse, starts)
        self.kept = self.sums, inverse

    def carry(self) -> Tensor:
        return operators.carry(self.k, self.w, self.u, self.sums, self.starts)

    def output(self, initial: Tensor | None) -> Tensor:
        states, written = operators.states(self.k, self.w, self.u, self.sums, initial, self.starts)
        return operators.output(self.q, self.k, written, self.sums, states, self.starts)


class _Backward(Backward):
    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        b: Tensor,
        starts: list[int],
        initial: Tensor | None,
        d_o: Tensor,
        sums: Tensor,
        inverse: Tensor,
    ):
        self.q, self.k, self.v, self.b, self.d_o, self.sums, self.inverse = q, k, v, b, d_o, sums, inverse
        self.starts = starts
        self.w, u = operators.wy(k, v, sums, b, inverse, starts)
        self.states, self.written = operators.states(k, self.w, u, sums, initial, starts)
        self.d_written = own_gradients(q, k, d_o, sums, starts)

    def carry(self) -> Tensor:
        return gradient_carry(self.q, self.k, self.w, self.sums, self.d_o, self.d_written, self.starts)

    def inputs(self, d_final: Tensor | None) -> InputGradients:
        q, k, v, sums, b, starts = self.q, self.k, self.v, self.sums, self.b, self.starts
        d_states, d_u = state_gradients(q, k, self.w, sums, self.d_o, self.d_written, d_final, starts)
        d_q, d_k, d_w, d_sums = read_gradients(
            q, k, self.written, sums, self.states, self.d_o, d_u, d_states, starts
        )
        d_k_of_wy, d_v, d_sums_of_wy, d_b = wy_gradients(k, v, sums, b, self.inverse, d_w, d_u, starts)
        d_sums.add_(d_sums_of_wy)
        d_q, d_k = (_of_groups(x, q.shape[2]) for x in (d_q, d_k.add_(d_k_of_wy)))
        return d_q, d_k, d_v, block_sums(d_sums, operators.block_of(d_sums), True, starts), d_b


def _of_groups(x: Tensor, groups: int) -> Tensor:
    """Returns the sum of x [B, L, Z, D] over the heads of each group, [B, L, G, D]."""
    return x if x.shape[2] == groups else x.unflatten(2, (groups, -1)).sum(3)


class _ForwardOfFeatures(_Forward):
    def __init__(self, *inputs: Any):
        super().__init__(*inputs)
        self.kept = self.kept[1:]


class _BackwardOfFeatures(_Backward):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, starts: list[int], *rest: Any):
        initial, d_o, inverse = rest
        sums = block_sums(g, operators.block_of(g), False, starts)
        super().__init__(q, k, v, g, b, starts, initial, d_o, sums, inverse)


class GatedDelta(Rule):
    """The rule whose M is I - b k^T k times the decay, a matrix D x D for each head."""

    forward: ClassVar[Callable[..., Forward]] = _Forward
    backward: ClassVar[Callable[..., Backward]] = _Backward
    scalar = False

    scale = staticmethod(operators.scale)

    @staticmethod
    def step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        """S_t [B, Z, D, A] from the state S_(t-1) and position t's k [B, Z, D], v [B, Z, A], b [B, Z] and
        g [B, Z], for KDA [B, Z, D]."""
        state = g.exp().view(*g.shape[:2], -1, 1) * state
        written = b.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
        return state + k.unsqueeze(-1) * written.unsqueeze(-2)


class KimiDelta(GatedDelta):
    """The rule of KDA, whose M is (I - b k^T k) Diag(exp(g)), with g [B, L, Z, D]."""

    forward, backward = _ForwardOfFeatures, _BackwardOfFeatures
