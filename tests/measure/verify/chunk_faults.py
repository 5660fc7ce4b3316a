"""Attention in rounds of heads, and by chunks of positions, with a planted fault each. None is registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.kernels.copy_stream import CopyStream
from spbench.impls.strategies.fpdt import FPDT
from spbench.impls.strategies.head_sources import HeadPart
from spbench.impls.strategies.repeated_attention import RepeatedAttention
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.strategies.upipe import Rounds, UPipe


class KeysOfTheFirstRounds(UPipe):
    """All rounds attend to the keys and values that were sent for the first."""

    _first: tuple[Tensor, Tensor] | None = None

    def keys_to_heads(self, k: Tensor, v: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
        self._first = self._first or super().keys_to_heads(k, v, repeats)
        return self._first


class OneBufferForAllMessages(UPipe):
    """What a message brought is overwritten by the next one, while it is still in use."""

    _held: Tensor | None = None

    def to_heads(self, x: Tensor) -> Tensor:
        received = super().to_heads(x)
        if self._held is None:
            self._held = torch.empty_like(received)
        return self._held.copy_(received)


class _FromTheLast(Rounds):
    def part(self, number: int, member: int = 0) -> HeadPart:
        return super().part(self.sets - 1 - number, self.each - 1 - member)


class OddRanksBeginWithTheLastRound(UPipe):
    """Each rank is sent other heads by odd ranks than by even ones."""

    def rounds(self, heads: int, groups: int) -> Rounds:
        rounds = super().rounds(heads, groups)
        return _FromTheLast(**vars(rounds)) if self.rank % 2 else rounds


class _LastRoundAlone(RepeatedAttention):
    """Gradients of keys and values of which the sum over rounds is that of the last one."""

    each = 1
    _calls = 0
    _before: Sequence[Tensor] = ()

    def backward(self, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        d_q, *of_round = super().backward(*tensors)
        first = self._calls % self.each == 0
        d_k, d_v = of_round if first else (x - y for x, y in zip(of_round, self._before, strict=True))
        self._calls += 1
        self._before = [x.clone() for x in of_round]
        return d_q, d_k, d_v


class KeyGradientsOfOneRound(UPipe):
    """Keys and values get the gradient of one round of queries, not the sum over their group's."""

    def repeated_attention(self, rounds: Rounds, attended: Attended) -> RepeatedAttention:
        attention = _LastRoundAlone(super().repeated_attention(rounds, attended).attend)
        attention.each = rounds.each
        return attention


class _OneBuffer(CopyStream):
    """All copies to the host go to the same memory."""

    def to_host(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        held: dict[Any, Tensor] = self.__dict__.setdefault("held", {})
        return super().to_host(x, held.setdefault((x.shape, x.dtype), self.room(x.shape, x.dtype)))


class _OneLate(CopyStream):
    """What comes back is what was asked for before."""

    def to_device(self, host: Tensor) -> Tensor:
        held: dict[Any, Tensor] = self.__dict__.setdefault("held", {})
        before = held.get((host.shape, host.dtype), host)
        held[host.shape, host.dtype] = host
        return super().to_device(before)


class _NoSums(CopyStream):
    """What has room on the host comes back as zeros, as sums that each step begins anew."""

    def room(self, *how: Any) -> Tensor:
        made = super().room(*how)
        self.__dict__.setdefault("rooms", []).append(made)
        return made

    def to_device(self, host: Tensor) -> Tensor:
        x = super().to_device(host)
        is_sum = any(host is room for room in self.__dict__.get("rooms", ()))
        return torch.zeros_like(x) if is_sum else x


class OneBufferOnTheHost(FPDT):
    """The keys of a chunk are overwritten by those of the next one."""

    def copies(self, device: torch.device) -> tuple[CopyStream, CopyStream]:
        return _OneBuffer(device), CopyStream(device)


class KeysOneChunkLate(FPDT):
    """Queries meet the chunk of keys before the one that is meant."""

    def copies(self, device: torch.device) -> tuple[CopyStream, CopyStream]:
        self._copies = self._copies or (_OneLate(device), CopyStream(device))
        return self._copies


class QueryGradientsOfOneChunk(FPDT):
    """Queries get the gradients of one chunk of keys, not of all."""

    def copies(self, device: torch.device) -> tuple[CopyStream, CopyStream]:
        return _NoSums(device), CopyStream(device)


class PositionsOfOneChunk(FPDT):
    """A rank has one run of the sequence, as if it were not cut in chunks."""

    def own(self, x: Tensor, dim: int) -> Tensor:
        return SequenceChunks.own(self, x, dim)
