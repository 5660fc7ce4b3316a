"""LASP with planted faults of states that pass between chunks. None is registered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from spbench.impls.kernels import linear_attention as kernels
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2


class StateNotDecayedAcrossChunks(Lasp):
    """What a rank sends on is the state it got plus its own, whatever the distance."""

    def send(self, state: Tensor, peer: int) -> None:
        if peer > self.rank and self.rank > 0:
            state = state + self.undecayed
        super().send(state, peer)

    def receive(self, peer: int, k: Tensor, v: Tensor) -> Tensor | None:
        received = super().receive(peer, k, v)
        if received is not None and peer < self.rank:
            self.undecayed = received / 2
        return received


class ChunkDecayOffByOne(Lasp):
    """The chunk is taken for one position longer than it is."""

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        with _final_state_of(k.shape[2] + 1):
            return super().linear_attention(q, k, v, mask)


@contextmanager
def _final_state_of(length: int) -> Iterator[None]:
    right = kernels.final_state

    def wrong(states: Tensor, initial: Tensor | None, decay: Tensor | None, _: int) -> Tensor:
        return right(states, initial, decay, length)

    with mock.patch.object(kernels, "final_state", wrong):
        yield


class StateGradientDropped(Lasp):
    """The gradient of the state never reaches the rank before."""

    def receive(self, peer: int, k: Tensor, v: Tensor) -> Tensor | None:
        received = super().receive(peer, k, v)
        return None if peer > self.rank else received


class StateOfThisChunkTwice(Lasp):
    """The gradient's state is taken from the wrong neighbour's place in time: doubled on the way back."""

    def send(self, state: Tensor, peer: int) -> None:
        super().send(2 * state if peer < self.rank else state, peer)


class StatesGatheredInWrongOrder(Lasp2):
    """As if the ranks were numbered from the other end."""

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        rank = self.rank
        self.rank = self.size - 1 - rank
        try:
            return super().linear_attention(q, k, v, mask)
        finally:
            self.rank = rank


class StateStartsAsGarbage(Lasp):
    """The first rank reads a buffer that nobody filled."""

    def receive(self, peer: int, k: Tensor, v: Tensor) -> Tensor | None:
        received = super().receive(peer, k, v)
        if received is None and peer < 0:
            return torch.ones(
                *k.shape[:2], k.shape[-1], v.shape[-1], dtype=kernels.state_dtype(k.dtype), device=k.device
            )
        return received


ALL = [
    StateNotDecayedAcrossChunks,
    ChunkDecayOffByOne,
    StateGradientDropped,
    StateOfThisChunkTwice,
    StatesGatheredInWrongOrder,
    StateStartsAsGarbage,
]
