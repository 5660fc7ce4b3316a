"""Gated recurrences: each position decays a state a head and writes to it; what their kernels share.

    S_t = exp(g_t) M_t S_(t-1) + b_t k_t^T v_t        o_t = q_t S_t + d v_t

where d is a number a head, or nothing. A rule says what M_t is: nothing in Mamba-2
(:mod:`spbench.impls.kernels.state_space`), I - b_t k_t^T k_t in Gated DeltaNet
(:mod:`spbench.impls.kernels.gated_delta`). Either way a run of positions is an affine map of
the state, S -> M S + U, and so is the gradient on the way back, dS -> M^T dS + W: what the positions of one
rank are to those of another. A rank that knows the map of each chunk knows the state before its own without
their positions. A document begins with a state of zero: there M is 0, and so it is of a run in which one
begins.

Shapes: q, k [B, L, G, D], v, o [B, L, Z, A], g <= 0 and b [B, L, Z] in the states' dtype (float32 for half
precisions), states [B, Z, D, A], d [Z]. Each head of q and k is that of Z/G consecutive ones of v. A carry,
a map S -> M S + U as one tensor, is [B, Z, E], with D x A elements of U and then those of M.
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
from spbench.impls.kernels.operator import operator

#: gradients of q, k, v, g and b
InputGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
#: a function from the tensors that forward kept (some may be None) to q, k, v, g and b, and for Mamba-2 d
Make = Callable[..., Sequence[Tensor]]


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


def timed(rule: type[Rule], nbytes: int) -> type[Rule]:
    """The rule, whose kernels are timed before their first calls, forward and backward: Triton's autotuner
    writes to a buffer of ``nbytes`` between runs, so that nothing is left in the L2 cache."""

    def holding(work: Any, method: str) -> Any:
        to_time = {method}

        def held(self: Any, state: Tensor | None) -> Any:
            buffer = self.q.new_empty(nbytes if to_time else 0, dtype=torch.uint8)
            to_time.clear()
            result = getattr(work, method)(self, state)
            del buffer
            return result

        return type(f"Timed{work.__name__}", (work,), {method: held})

    kernels = {"forward": holding(rule.forward, "output"), "backward": holding(rule.backward, "inputs")}
    return type(f"Timed{rule.__name__}", (rule,), kernels)


@operator(
    "spbench::recurrence_merged", fake=lambda carries, size, *_: carries.new_empty(*carries.shape[1:3], *size)
)
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
        ctx: Any,
        rule: type[Rule],
        passing: StatePassing | None,
        starts: list[int],
        make: Make | None,
        *sources: Any,
    ) -> Tensor:
        *inputs, skip = _with_skip(sources if make is None else make(*sources))
        run, initial = rule.forward(*inputs, starts), None
        if passing is not None:
            initial = passing.state(rule, run.carry, partial(_empty_state, *inputs), 1)
        ctx.save_for_backward(*sources, initial, *run.kept)
        ctx.rule, ctx.passing, ctx.starts, ctx.make, ctx.sources = rule, passing, starts, make, len(sources)
        o = run.output(initial)
        return o if skip is None else o.addcmul_(skip.unsqueeze(-1), inputs[2])

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Any, ...]:
        saved, d_final = ctx.saved_tensors, None  # once: checkpointing unpacks them
        sources, (initial, *kept) = saved[: ctx.sources], saved[ctx.sources :]
        again, room = None if ctx.make is None else _MadeAgain(ctx.make, sources), None
        *inputs, skip = _with_skip(sources if again is None else again.inputs)
        d_o = d_o.contiguous()
        if again is not None:
            # of the gradients of what was projected, which such kernels make first
            projected = (x for x in sources if x is not None and x.shape[:2] == d_o.shape[:2])
            room = [torch.empty_like(x) for x in projected]
        run = ctx.rule.backward(*inputs, ctx.starts, initial, d_o, *kept)
        if ctx.passing is not None:
            d_final = ctx.passing.state(ctx.rule, run.carry, partial(_empty_state, *inputs), -1)
        gradients: Sequence[Tensor] = run.inputs(d_final)
        if skip is not None:
            gradients[2].addcmul_(skip.unsqueeze(-1), d_o)
            gradients = *gradients, torch.linalg.vecdot(d_o, inputs[2]).sum((0, 1))
        del run, room
        return None, None, None, None, *(gradients if again is None else again.back(gradients))


def _with_skip(inputs: Sequence[Any]) -> list[Any]:
    """q, k, v, g and b, as the operators want them, and d or None."""
    return [*(x.contiguous() for x in inputs[:5]), inputs[5] if len(inputs) > 5 else None]


class _MadeAgain:
    """What backward makes again: the inputs of a recurrence, of what was kept.

    Attributes:
        inputs: without gradients.
    """

    def __init__(self, make: Make, sources: Sequence[Any]):
        self._sources = [None if x is None else x.detach().requires_grad_() for x in sources]
        with torch.enable_grad():
            self._made = make(*self._sources)
        self.inputs = [x.detach() for x in self._made]

    def back(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of what was kept, given those of the inputs."""
        kept = [x for x in self._sources if x is not None]
        of_kept = iter(torch.autograd.grad(self._made, kept, gradients))
        return [None if x is None else next(of_kept) for x in self._sources]


def _empty_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, _: Tensor) -> Tensor:
    return g.new_empty(len(q), v.shape[2], q.shape[-1], v.shape[-1])


def gated_recurrence(
    rule: type[Rule],
    *sources: Any,
    passing: StatePassing | None = None,
    starts: Sequence[int] = (),
    make: Make | None = None,
) -> Tensor:
    """o [B, L, Z, A] of a sequence from a state of zero, or of the part of it that ``passing`` knows. At each
    of the positions ``starts`` a document begins, with a state of zero; negative ones lie before the part.

    Args:
        sources: q, k, v, g and b, and maybe d; with ``make`` what it makes these of, which alone is kept.
    """
    begin = [start for start in starts if start >= 0]
    kept = sources if make is not None else [x.contiguous() for x in sources if x is not None]
    return _GatedRecurrence.apply(rule, passing, begin, make, *kept)


def sequential(
    rule: type[Rule],
    *sources: Any,
    starts: Sequence[int] = (),
    make: Make | None = None,
) -> Tensor:
    """The recurrence over a whole sequence, position by position in torch's own operators: the reference."""
    q, k, v, g, b, *skip = sources if make is None else make(*sources)
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
    o = (rule.scale(q.shape[-1]) * torch.stack(outputs, 1)).to(v.dtype)
    return torch.addcmul(o, skip[0].unsqueeze(-1), v) if skip else o
