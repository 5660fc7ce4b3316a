"""LASP, LASP-2 and Ulysses with planted faults of states between chunks, and of gated recurrences."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels import linear_attention as kernels
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.recurrence import Rule
from spbench.impls.layout import HEEDS_ALL
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.lasp2h import Exchange, Lasp2H
from spbench.impls.strategies.recurrence import Mix
from spbench.impls.strategies.recurrent_chunks import Chain, Gather
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.verify.planting import as_in, patching, planted

# states of linear attention


def _undecayed_sent(self: Any, honest: Any, state: Tensor, peer: int) -> None:
    """What a rank sends on is the state it got plus its own, whatever the distance."""
    honest(state + self.undecayed if peer > self.rank > 0 else state, peer)


def _undecayed_noted(self: Any, honest: Any, peer: int, k: Tensor, v: Tensor) -> Tensor | None:
    received: Tensor | None = honest(peer, k, v)
    if received is not None and peer < self.rank:
        self.undecayed = received / 2
    return received


_honest_state = kernels.final_state


def _one_position_longer(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Any:
    """The chunk is taken for one position longer than it is."""

    def final_state(states: Tensor, initial: Tensor | None, decay: Tensor | None, _: int) -> Tensor:
        return _honest_state(states, initial, decay, k.shape[2] + 1)

    return patching(kernels, final_state=final_state)(self, honest, q, k, v, mask)


def _from_the_other_end(self: Any, honest: Any, *args: Any) -> Tensor:
    """As if the ranks were numbered from the other end."""
    rank, self.rank = self.rank, self.size - 1 - self.rank
    try:
        o: Tensor = honest(*args)
        return o
    finally:
        self.rank = rank


def _garbage_for_nothing(self: Any, honest: Any, peer: int, k: Tensor, v: Tensor) -> Tensor | None:
    """The first rank reads a buffer that nobody filled."""
    received: Tensor | None = honest(peer, k, v)
    if received is None and peer < 0:
        sizes = *k.shape[:2], k.shape[-1], v.shape[-1]
        return torch.ones(*sizes, dtype=kernels.state_dtype(k.dtype), device=k.device)
    return received


def _none_from_later(self: Any, honest: Any, peer: int, k: Tensor, v: Tensor) -> Tensor | None:
    """The gradient of the state never reaches the rank before."""
    received: Tensor | None = honest(peer, k, v)
    return None if peer > self.rank else received


StateNotDecayedAcrossChunks = planted(Lasp, send=_undecayed_sent, receive=_undecayed_noted)
ChunkDecayOffByOne = planted(Lasp, linear_attention=_one_position_longer)
StateGradientDropped = planted(Lasp, receive=_none_from_later)
# the gradient's state is taken from the wrong neighbour's place in time: doubled on the way back
StateOfThisChunkTwice = planted(
    Lasp, send=lambda self, honest, state, peer: honest(2 * state if peer < self.rank else state, peer)
)
StatesGatheredInWrongOrder = planted(Lasp2, linear_attention=_from_the_other_end)
StateStartsAsGarbage = planted(Lasp, receive=_garbage_for_nothing)

#: of states of linear attention
OF_STATES = [
    *(StateNotDecayedAcrossChunks, ChunkDecayOffByOne, StateGradientDropped, StateOfThisChunkTwice),
    *(StatesGatheredInWrongOrder, StateStartsAsGarbage),
]


# gated recurrences


class _WithoutStateGradient(Gather):
    def state(self, *how: Any) -> Tensor | None:
        state = super().state(*how)
        return state if how[-1] > 0 else None


class _WithoutRowGradient(Chain):
    def rows(self, rows: Tensor, step: int) -> Tensor:
        passed = super().rows(rows, step)
        return passed if step > 0 else torch.zeros_like(rows)


class _Adding(Chain):
    def state(self, rule: type[Rule], carry: Callable[[], Tensor], *how: Any) -> Tensor | None:
        def without_transition() -> Tensor:
            own = carry().clone()
            if rule.scalar:
                own[..., -1] = 1.0
            else:
                empty: Tensor = how[0]()
                d, a = empty.shape[-2:]
                own.unflatten(-1, (d, -1))[..., a:] = torch.eye(d, dtype=own.dtype)
            return own

        return super().state(rule, without_transition, *how)


class _RoundedTransition(Gather):
    def state(self, rule: type[Rule], carry: Callable[[], Tensor], *how: Any) -> Tensor | None:
        def in_half_precision() -> Tensor:
            own, (d, a) = carry().clone(), how[0]().shape[-2:]
            own[..., -1] = own[..., -1].bfloat16()  # of Mamba-2, a number
            if not rule.scalar:
                of_rows = own.unflatten(-1, (d, -1))
                of_rows[..., a:] = of_rows[..., a:].bfloat16()
            return own

        return super().state(rule, in_half_precision, *how)


def _of_first_heads(dims: int, number: int) -> Callable[..., Tensor]:
    """Every rank has the first rank's heads of one weight, ``number`` places behind the first with so many
    dims."""

    def mix_by_heads(
        self: Any, honest: Any, mix: Mix, by_heads: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Any:
        wrong = [*weights]
        place = next(i for i, w in enumerate(weights) if w.ndim == dims) + number
        own = wrong[place].chunk(self.size)[0]
        wrong[place] = own.repeat(self.size, *[1] * (own.ndim - 1))
        return honest(mix, by_heads, wrong)

    return mix_by_heads


# linear layers run on a rank's part of the sequence, as if it were the whole
ZeroStateOnEveryRank = planted(Lasp2, gated_recurrence=as_in(Strategy, "gated_recurrence"))
# a convolution sees zeros before a rank's first position
HaloForgotten = planted(Lasp2, rows_before=as_in(Strategy, "rows_before"))
# what later chunks want of a chunk's state never reaches it
StateGradientStopsAtTheEdge = planted(Lasp2, passing=_WithoutStateGradient)
# the next chunk's gradient of the rows that it was given is dropped
RowGradientStopsAtTheEdge = planted(Lasp, passing=_WithoutRowGradient)
# a rank sends on the state that it got plus its own, as linear attention without decay may
StatesAddedWithoutTransition = planted(Lasp, passing=_Adding)
# the map M that is sent is rounded to bfloat16, which fla's ops/cp/README.md warns of
TransitionInHalfPrecision = planted(Lasp2, passing=_RoundedTransition)
# A_log, dt_bias and the values' convolution are not sliced by head
DecayOfFirstHeads = planted(Ulysses, mix_by_heads=_of_first_heads(1, 0))
StepBiasOfFirstHeads = planted(Ulysses, mix_by_heads=_of_first_heads(1, 1))
ConvolutionOfFirstHeads = planted(Ulysses, mix_by_heads=_of_first_heads(3, 2))

#: of gated recurrences
OF_RECURRENCES = [
    *(ZeroStateOnEveryRank, HaloForgotten, StateGradientStopsAtTheEdge, RowGradientStopsAtTheEdge),
    *(StatesAddedWithoutTransition, TransitionInHalfPrecision, DecayOfFirstHeads, StepBiasOfFirstHeads),
    ConvolutionOfFirstHeads,
]


# queries of softmax attention that an all-to-all places zigzag

QueriesMaskedByTheirChunks = planted(
    Lasp2H,
    meetings=lambda self, honest, q, placement, attended: honest(q, "contiguous", attended),
)
OutputsLeftZigzag = planted(
    Lasp2H,
    heeds=HEEDS_ALL,
    causal_attention=patching(Exchange, back=lambda self, x, group: x.contiguous()),
)
