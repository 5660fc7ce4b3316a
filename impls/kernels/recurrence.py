"""The common part of gated recurrences, in which each position decays each head's state and writes to it.

    S_t = exp(g_t) M_t S_(t-1) + b_t k_t^T v_t        o_t = q_t S_t + d v_t

where d, a number a head, may be left out. A rule says what M_t is: the identity in Mamba-2
(:mod:`spbench.impls.kernels.state_space`), I - b_t k_t^T k_t in Gated DeltaNet
(:mod:`spbench.impls.kernels.gated_delta`). With both rules, a run of positions is an affine map of the state,
S -> M S + U, and backward has an affine map of the gradient, dS -> M^T dS + W. So a rank that receives the
map of each earlier chunk can compute the state before its own chunk without the positions of other ranks. A
document begins with a state of zero, so M is 0 for a run of positions in which a document begins.

Shapes: q, k [B, L, G, D], v, o [B, L, Z, A], g <= 0 and b [B, L, Z] in the states' dtype (float32 for half
precisions), states [B, Z, D, A], d [Z]. Z/G consecutive heads of v share one head of q and k. A carry is a
map S -> M S + U as one tensor [B, Z, E], with the elements of U and M.
"""

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
    """A rule's forward pass over the positions of one rank. Its arguments are q, k, v, g, b, and the
    positions at which documents begin.

    Attributes:
        kept: the tensors that backward needs in addition to these arguments.
    """

    kept: tuple[Tensor, ...] = ()

    @abstractmethod
    def carry(self) -> Tensor:
        """The map of these positions [B, Z, E]."""

    @abstractmethod
    def output(self, initial: Tensor | None) -> Tensor:
        """o [B, L, Z, A]; ``initial`` is the state before the first position (None: zero)."""


class Backward(ABC):
    """A rule's backward pass. Its arguments are q, k, v, g, b, the positions at which documents begin, the
    initial state, d_o, and the tensors :attr:`Forward.kept`."""

    @abstractmethod
    def carry(self) -> Tensor:
        """The map of gradients [B, Z, E], from the gradient of the state after the last position to the
        gradient of the state before the first."""

    @abstractmethod
    def inputs(self, d_final: Tensor | None) -> InputGradients:
        """The gradients of q, k, v, g and b; ``d_final`` is the final state's gradient (None: zero)."""


class Rule(ABC):
    """A rule, which says how a position changes the state.

    Attributes:
        forward, backward: the classes that run the rule's kernels.
        scalar: whether M is a number for each head; otherwise M is a matrix D x D.
    """

    forward: ClassVar[Callable[..., Forward]]
    backward: ClassVar[Callable[..., Backward]]
    scalar: ClassVar[bool]

    @classmethod
    def carry_elements(cls, d: int, a: int) -> int:
        """E, the number of a carry's elements for each head."""
        return d * a + (1 if cls.scalar else d * d)

    @classmethod
    def merged(
        cls, carries: Tensor, size: Sequence[int], order: Sequence[int], initial: Tensor | None = None
    ) -> Tensor:
        """The state [B, Z, D, A] after applying the maps of ``carries`` [N, B, Z, E], in the ``order`` of
        their numbers, to the initial state (None: zero). It is one kernel, as in fla's context parallelism
        (merge_fwd_bwd_kernel). ``size`` is (D, A)."""
        return _merged(carries, list(size), list(order), cls.scalar, initial)

    @staticmethod
    def scale(d: int) -> float:
        """The factor of outputs for queries with D features."""
        return 1.0

    @staticmethod
    @abstractmethod
    def step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        """The state [B, Z, D, A] after one position, whose k is [B, Z, D], v [B, Z, A], g and b [B, Z]."""


def timed(rule: type[Rule], nbytes: int) -> type[Rule]:
    """The rule with a buffer of ``nbytes`` allocated during the first call of forward and of backward,
    because Triton's autotuner times kernels then and writes to the buffer between runs to clear the L2
    cache."""

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
    """A way for the ranks of a sequence to exchange the states at the edges of their chunks."""

    @abstractmethod
    def state(
        self, rule: type[Rule], carry: Callable[[], Tensor], empty: Callable[[], Tensor], step: int
    ) -> Tensor | None:
        """The state before this rank's positions (None: zero), where ``carry`` returns their map. With a
        ``step`` of -1, it is the gradient of the state after these positions, and ``carry`` returns the map
        of gradients. ``empty`` returns an empty state [B, Z, D, A]."""


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
        saved, d_final = ctx.saved_tensors, None  # read once, because checkpointing unpacks at each read
        sources, (initial, *kept) = saved[: ctx.sources], saved[ctx.sources :]
        again, room = None if ctx.make is None else _MadeAgain(ctx.make, sources), None
        *inputs, skip = _with_skip(sources if again is None else again.inputs)
        d_o = d_o.contiguous()
        if again is not None:
            # room for the gradients of projections, which kernels with ``make`` allocate first
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
    """q, k, v, g and b, each contiguous as the operators need it, and then d or None."""
    return [*(x.contiguous() for x in inputs[:5]), inputs[5] if len(inputs) > 5 else None]


class _MadeAgain:
    """The inputs of a recurrence, which backward makes again from the sources that forward kept.

    Attributes:
        inputs: q, k, v, g and b, and maybe d, detached from autograd.
    """

    def __init__(self, make: Make, sources: Sequence[Any]):
        self._sources = [None if x is None else x.detach().requires_grad_() for x in sources]
        with torch.enable_grad():
            self._made = make(*self._sources)
        self.inputs = [x.detach() for x in self._made]

    def back(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the sources (None for a source that is None), from the gradients of the inputs."""
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
    """o [B, L, Z, A] of a sequence whose first state is zero, or with ``passing`` of this rank's part of the
    sequence. A document begins at each position of ``starts``; negative positions lie before the part.

    Args:
        sources: q, k, v, g and b, and maybe d; or the tensors from which ``make`` makes these, and which are
            kept in their place.
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
    """The reference o [B, L, Z, A] of a whole sequence, position by position in torch's own operators."""
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
