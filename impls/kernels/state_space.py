"""The state space duality of Mamba-2 (Dao and Gu, arXiv 2405.21060, section 6), in blocks, as operators.

    S_t = exp(g_t) S_(t-1) + b_t k_t^T v_t        o_t = q_t S_t

q is the paper's C, k its B, v its X, b its step size and g the step size times A. The operators correspond to
mamba_ssm's kernels (ops/triton/ssd_combined.py) and allocate the same tensors: the scores q k^T of each block
and group of heads, the state that each block adds in float32, and the state before each block in the inputs'
dtype. Forward keeps only the inputs and the initial state, and backward makes these tensors again. Shapes are
those of :mod:`spbench.impls.kernels.recurrence`, with C blocks.
"""

import torch
from torch import Tensor

from spbench.impls.kernels import state_space_operators as operators
from spbench.impls.kernels.recurrence import Backward, Forward, InputGradients, Rule


class _Forward(Forward):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, starts: list[int]):
        self.q, self.k, self.v, self.b, self.starts = q, k, v, b, starts
        self.sums = operators.summed(g)
        self.states = operators.block_states(k, v, self.sums, b, starts)

    def carry(self) -> Tensor:
        return operators.carry(self.states, self.sums, False, self.starts)

    def output(self, initial: Tensor | None) -> Tensor:
        before = operators.passed(self.states, self.sums, initial, self.v, False, self.starts)
        del self.states
        return operators.output(
            operators.scores(self.q, self.k), self.q, self.v, self.sums, self.b, before, self.starts
        )


class _Backward(Backward):
    #: multiprocessors of the card (:func:`on_processors`); 0: no card
    processors = 0

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
    ):
        self.q, self.k, self.v, self.b, self.d_o, self.starts = q, k, v, b, d_o, starts
        # room for the gradients of q, k and v, which mamba_ssm allocates first
        self.room = [torch.empty_like(x) for x in (q, k, v)]
        self.sums, self.scores = operators.summed(g), operators.scores(q, k)
        own = operators.block_states(k, v, self.sums, b, starts)
        self.before = operators.passed(own, self.sums, initial, v, False, starts)
        del own
        self.d_before = operators.output_state_gradients(q, d_o, self.sums, starts)

    def carry(self) -> Tensor:
        return operators.carry(self.d_before, self.sums, True, self.starts)

    def inputs(self, d_final: Tensor | None) -> InputGradients:
        d_after = operators.passed(self.d_before, self.sums, d_final, self.v, True, self.starts)
        del self.d_before
        count = operators.shares(self.v.shape[2], self.q.shape[2], self._blocks, self.processors)
        of_keys, of_writing = operators.key_gradients(
            self.k, self.v, self.sums, self.b, d_after, count, self.starts
        )
        of_keys = of_keys.sum(1)
        of_queries, of_reading = operators.query_gradients(
            self.q, self.sums, self.d_o, self.before, count, self.starts
        )
        of_queries = of_queries.sum(1)
        d_scores = operators.score_gradients(
            self.v, self.d_o, self.sums, self.b, self.q.shape[2], count, self.starts
        ).sum(1)
        del self.room
        d_q, d_k, d_v, d_sums, d_b = operators.input_gradients(
            self.q,
            self.k,
            self.v,
            self.sums,
            self.b,
            self.d_o,
            self.scores,
            d_scores,
            self.before,
            d_after,
            [of_queries, of_reading, of_keys, of_writing],
            self.starts,
        )
        return d_q, d_k, d_v, operators.summed(d_sums, True), d_b

    @property
    def _blocks(self) -> int:
        """The number of blocks in all sequences of the batch."""
        return len(self.v) * self.before.shape[2]


class StateSpace(Rule):
    """The rule whose M is only the decay, a number for each head."""

    forward, backward, scalar = _Forward, _Backward, True

    @staticmethod
    def step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        """S_t [B, Z, D, A] from the state S_(t-1) and position t's k [B, Z, D], v [B, Z, A], g, b [B, Z]."""
        written = k.unsqueeze(-1) * (b.unsqueeze(-1) * v).unsqueeze(-2)
        return g.exp()[..., None, None] * state + written


def on_processors(rule: type[Rule], count: int) -> type[Rule]:
    """The rule for a card with ``count`` multiprocessors, over which Mamba-2's backward spreads heads."""
    if not issubclass(rule, StateSpace):
        return rule
    backward = type("_BackwardOnProcessors", (_Backward,), {"processors": count})
    return type(f"{rule.__name__}OnProcessors", (rule,), {"backward": backward})
