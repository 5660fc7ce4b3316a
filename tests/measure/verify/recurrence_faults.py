"""LASP, LASP-2 and Ulysses with planted faults of gated recurrences. None is registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from spbench.impls.kernels.recurrence import Rule
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.recurrence import Mix
from spbench.impls.strategies.recurrent_chunks import Chain, Gather
from spbench.impls.strategies.ulysses import Ulysses


class ZeroStateOnEveryRank(Lasp2):
    """Linear layers run on a rank's part of the sequence, as if it were the whole."""

    gated_recurrence = Strategy.gated_recurrence


class HaloForgotten(Lasp2):
    """A convolution sees zeros before a rank's first position."""

    rows_before = Strategy.rows_before


class _WithoutStateGradient(Gather):
    def state(self, *how: Any) -> Tensor | None:
        state = super().state(*how)
        return state if how[-1] > 0 else None


class StateGradientStopsAtTheEdge(Lasp2):
    """What later chunks want of a chunk's state never reaches it."""

    passing = _WithoutStateGradient


class _WithoutRowGradient(Chain):
    def rows(self, rows: Tensor, step: int) -> Tensor:
        passed = super().rows(rows, step)
        return passed if step > 0 else torch.zeros_like(rows)


class RowGradientStopsAtTheEdge(Lasp):
    """The next chunk's gradient of the rows that it was given is dropped."""

    passing = _WithoutRowGradient


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


class StatesAddedWithoutTransition(Lasp):
    """A rank sends on the state that it got plus its own, as linear attention without decay may."""

    passing = _Adding


class _OfFirstHeads(Ulysses):
    """Every rank has the first rank's heads of a weight."""

    #: of weights with so many dims
    dims: ClassVar[int] = 1
    #: which of these
    number: ClassVar[int]

    def mix_by_heads(self, mix: Mix, by_heads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        wrong = [*weights]
        place = [i for i, w in enumerate(weights) if w.ndim == self.dims][self.number]
        first = wrong[place].chunk(self.size)[0]
        wrong[place] = first.repeat(self.size, *[1] * (self.dims - 1))
        return super().mix_by_heads(mix, by_heads, wrong)


class DecayOfFirstHeads(_OfFirstHeads):
    """A_log is not sliced by head."""

    number = 0


class StepBiasOfFirstHeads(_OfFirstHeads):
    """dt_bias is not sliced by head."""

    number = 1


class ConvolutionOfFirstHeads(_OfFirstHeads):
    """The values' convolution is not sliced by head."""

    dims = 3
    number = 2


ALL = [
    ZeroStateOnEveryRank,
    HaloForgotten,
    StateGradientStopsAtTheEdge,
    RowGradientStopsAtTheEdge,
    StatesAddedWithoutTransition,
    DecayOfFirstHeads,
    StepBiasOfFirstHeads,
    ConvolutionOfFirstHeads,
]
