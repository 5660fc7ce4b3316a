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

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from spbench.impls.kernels import gated_delta_gradients as gradients
from spbench.impls.kernels import gated_delta_operators as operators
from spbench.impls.kernels.recurrence import Backward, Forward, InputGradients, Rule
from spbench.impls.kernels.recurrence_blocks import block_sums


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
        self.d_written = gradients.own_gradients(q, k, d_o, sums, starts)

    def carry(self) -> Tensor:
        return gradients.gradient_carry(
            self.q, self.k, self.w, self.sums, self.d_o, self.d_written, self.starts
        )

    def inputs(self, d_final: Tensor | None) -> InputGradients:
        q, k, v, sums, b, starts = self.q, self.k, self.v, self.sums, self.b, self.starts
        d_states, d_u = gradients.state_gradients(
            q, k, self.w, sums, self.d_o, self.d_written, d_final, starts
        )
        d_q, d_k, d_w, d_sums = gradients.read_gradients(
            q, k, self.written, sums, self.states, self.d_o, d_u, d_states, starts
        )
        d_k_of_wy, d_v, d_sums_of_wy, d_b = gradients.wy_gradients(
            k, v, sums, b, self.inverse, d_w, d_u, starts
        )
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
