"""Gated recurrences: each position decays a state a head and writes to it; what their kernels share.

    S_t = exp(g_t) M_t S_(t-1) + b_t k_t^T v_t        o_t = q_t S_t

A rule says what M_t is: nothing in Mamba-2 (:mod:`spbench.impls.kernels.state_space`), I - b_t k_t^T k_t in
Gated DeltaNet (:mod:`spbench.impls.kernels.gated_delta`). Either way a run of positions is an affine map of
the state, S -> M S + U, and so is the gradient on the way back, dS -> M^T dS + W: what the positions of one
rank are to those of another. A rank that knows the map of each chunk knows the state before its own without
their positions. A document begins with a state of zero: there M is 0, and so it is of a run in which one
begins.

Shapes: q, k [B, L, G, D], v, o [B, L, Z, A], g <= 0 and b [B, L, Z] in the states' dtype (float32 for half
precisions), states [B, Z, D, A]. Each head of q and k is that of Z/G consecutive ones of v. A carry, a map
S -> M S + U as one tensor, is [B, Z, E], with D x A elements of U and then those of M.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.kernels.decay import state_dtype

#: gradients of q, k, v, g and b
InputGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Forward(ABC):
    """A rule's work on the positions of one rank; made of q, k, v, g, b, and the positions at which documents
    begin.

    Attributes:
        kept: what backward needs of it, beside these inputs.
    """

    kept: tuple[Tensor, ...] = ()

    @abstractmethod
    def carry(self) -> Tensor:
        """The map of these positions [B, Z, E]."""

    @abstractmethod
    def output(self, initial: Tensor | None) -> Tensor:
        """o [B, L, Z, A], given the state before the first position (None: zero)."""


class Backward(ABC):
    """The way back; made of q, k, v, g, b, the positions at which documents begin, the initial state, d_o,
    and what forward kept."""

    @abstractmethod
    def carry(self) -> Tensor:
        """The map of gradients [B, Z, E]: from that of the state after the last position to that of the state
        before the first."""

    @abstractmethod
    def inputs(self, d_final: Tensor | None) -> InputGradients:
        """The gradients of the inputs, given that of the state after the last position (None: zero)."""


class Rule(ABC):
    """How a state is carried past a position.

    Attributes:
        forward, backward: its kernels.
        scalar: whether M is a number a head; else it is D x D.
    """

    forward: ClassVar[Callable[..., Forward]]
    backward: ClassVar[Callable[..., Backward]]
    scalar: ClassVar[bool]

    @classmethod
    def carry_elements(cls, d: int, a: int) -> int:
        """E, numbers a head of a carry."""
        return d * a + (1 if cls.scalar else d * d)

    @classmethod
    def merged(
        cls, carries: Tensor, size: Sequence[int], order: Sequence[int], initial: Tensor | None = None
    ) -> Tensor:
        """The state [B, Z, D, A] that the maps ``order`` of ``carries`` [N, B, Z, E], one after another, make
        of an initial one (None: zero); one kernel, as in fla's context parallelism (merge_fwd_bwd_kernel).
        ``size`` is (D, A)."""
        return _merged(carries, list(size), list(order), cls.scalar, initial)

    @staticmethod
    def scale(d: int) -> float:
        """By which outputs are scaled, of queries of D features."""
        return 1.0

    @staticmethod
    @abstractmethod
    def step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        """The state [B, Z, D, A] after one position, of k [B, Z, D], v [B, Z, A], g and b [B, Z]."""


@torch.library.custom_op("spbench::recurrence_merged", mutates_args=())
def _merged(
    carries: Tensor, size: list[int], order: list[int], scalar: bool, initial: Tensor | None
) -> Tensor:
    d, a = size
    state = carries.new_zeros(*carries.shape[1:3], d, a) if initial is None else initial.clone()
    for carry in (carries[number] for number in order):
        if scalar:
            u, m = carry.split([d * a, 1], -1)
            state = torch.addcmul(u.unflatten(-1, (d, a)), m.unsqueeze(-1), state)
        else:
            u, m = carry.unflatten(-1, (d, a + d)).split([a, d], -1)
            state = u + m @ state
    return state.contiguous()


@_merged.register_fake
def _(carries: Tensor, size: list[int], *_: Any) -> Tensor:
    return carries.new_empty(*carries.shape[1:3], *size)


@register_flop_formula(torch.ops.spbench.recurrence_merged)
def _merged_flops(
    carries: Sequence[int], size: list[int], order: list[int], scalar: bool, *_: Any, **__: Any
) -> int:
    heads, (d, a) = carries[1] * carries[2], size
    return 2 * heads * len(order) * (1 if scalar else d) * d * a


class StatePassing(ABC):
    """How the ranks of a sequence learn the states at the edges of their chunks."""

    @abstractmethod
    def state(
        self, rule: type[Rule], carry: Callable[[], Tensor], empty: Callable[[], Tensor], step: int
    ) -> Tensor | None:
        """The state before this rank's positions (None: zero), given their map; for a ``step`` of -1 the
        gradient of the state after them, given the map of gradients. ``empty`` makes room for one, [B, Z, D,
        A]."""


class _GatedRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rule: type[Rule], passing: StatePassing | None, starts: list[int], *inputs: Tensor
    ) -> Tensor:
        run, initial = rule.forward(*inputs, starts), None
        if passing is not None:
            initial = passing.state(rule, run.carry, partial(_empty_state, *inputs), 1)
        ctx.save_for_backward(*inputs, initial, *run.kept)
        ctx.rule, ctx.passing, ctx.starts = rule, passing, starts
        return run.output(initial)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Any, ...]:
        saved, d_final = ctx.saved_tensors, None  # once: checkpointing unpacks them
        inputs, (initial, *kept) = saved[:5], saved[5:]
        run = ctx.rule.backward(*inputs, ctx.starts, initial, d_o.contiguous(), *kept)
        if ctx.passing is not None:
            d_final = ctx.passing.state(ctx.rule, run.carry, partial(_empty_state, *inputs), -1)
        return None, None, None, *run.inputs(d_final)


def _empty_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return g.new_empty(len(q), v.shape[2], q.shape[-1], v.shape[-1])


def gated_recurrence(
    rule: type[Rule],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    passing: StatePassing | None = None,
    starts: Sequence[int] = (),
) -> Tensor:
    """o [B, L, Z, A] of a sequence from a state of zero, or of the part of it that ``passing`` knows. At each
    of the positions ``starts`` a document begins, with a state of zero; negative ones lie before the part."""
    begin = [start for start in starts if start >= 0]
    return _GatedRecurrence.apply(rule, passing, begin, *(x.contiguous() for x in (q, k, v, g, b)))


def sequential(
    rule: type[Rule], q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, starts: Sequence[int] = ()
) -> Tensor:
    """The same of a whole sequence, position by position in torch's own operators: the reference."""
    dtype = state_dtype(q.dtype)
    heads = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(heads, 2).to(dtype) for x in (q, k))
    state = q.new_zeros(*v.shape[:1], v.shape[2], q.shape[-1], v.shape[-1])
    outputs = []
    for i in range(v.shape[1]):
        if i in starts:
            state = torch.zeros_like(state)
        state = rule.step(state, k[:, i], v[:, i].to(dtype), g[:, i], b[:, i])
        outputs.append((q[:, i].unsqueeze(-2) @ state).squeeze(-2))
    return (rule.scale(q.shape[-1]) * torch.stack(outputs, 1)).to(v.dtype)
