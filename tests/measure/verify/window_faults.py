"""Strategies that treat sliding windows and attention sinks wrongly. None is registered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.layout import HEEDS_ALL, Shard, mark_shard
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.fpdt import FPDT
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from spbench.impls.strategies.upipe import Rounds, UPipe


class WindowOffByOne(RingAttention):
    """Keys j with i - window <= j: FlashAttention's window_size has one position less than the window."""

    heeds = HEEDS_ALL

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings, sinks: Tensor | None = None
    ) -> Tensor:
        window = meetings.attended.window
        assert window is not None
        further = replace(meetings, attended=replace(meetings.attended, window=window + 1))
        return super().attend(q, k, v, further, sinks)


class _WithoutHalo(Meetings):
    @property
    def halo(self) -> tuple[int, ...]:
        return ()


class HaloForgotten(AllGatherKV):
    """Each rank's own keys alone."""

    heeds = HEEDS_ALL

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings, sinks: Tensor | None = None
    ) -> Tensor:
        return super().attend(q, k, v, _WithoutHalo(**vars(meetings)), sinks)


class SinkOnceAChunk(RingAttention):
    """The sink in the denominator of each chunk's attention, before they are merged."""

    heeds = HEEDS_ALL

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is not None
        chunks = sum(meetings.of(owner) is not None for owner in range(self.size))
        return super().attend(q, k, v, meetings, sinks + math.log(chunks))


class SinkWithoutGradient(RingAttention):
    heeds = HEEDS_ALL

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings, sinks: Tensor | None = None
    ) -> Tensor:
        return super().attend(q, k, v, meetings, None if sinks is None else sinks.detach())


class SinksOfOtherHeads(Ulysses):
    """Those of the next rank's heads."""

    def of_own_heads(self, numbers: Tensor) -> Tensor:
        return numbers.chunk(self.size)[(self.rank + 1) % self.size]


class _OtherRounds(Rounds):
    def of_rank(self, numbers: Tensor, rank: int) -> Tensor:
        return super().of_rank(numbers, rank).flip(0)


class SinksOfOtherRounds(UPipe):
    """Those of the heads of other rounds, each round with as many."""

    def rounds(self, heads: int, groups: int) -> Rounds:
        return _OtherRounds(**vars(super().rounds(heads, groups)))


class ChunksSeenWhole(FPDT):
    """Queries of a chunk see all keys of earlier chunks, as without a window."""

    def blocks_seen(self, chunks: Sequence[slice], attended: Attended) -> dict[tuple[int, int], Seen]:
        of_window, whole = super().blocks_seen(chunks, attended), super().blocks_seen(chunks, CAUSAL)
        return {(i, j): of_window[i, j] if i == j else seen for (i, j), seen in whole.items()}


class SinksSplitOtherwise(TensorParallel):
    """As SinksOfOtherHeads, of a parameter of which each rank has a part."""

    def feature_parameter(self, initial: Tensor) -> nn.Parameter:
        other = Shard(self.axes[0], 0, (self.rank + 1) % self.size, self.size)
        return mark_shard(super().feature_parameter(initial), other)
