"""Strategies that treat packed documents, sliding windows and attention sinks wrongly, as public code has."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from spbench.impls.attended import CAUSAL, Attended, Numbers
from spbench.impls.kernels.packed_linear_attention import Chunk
from spbench.impls.layout import HEEDS_ALL, Shard, mark_shard
from spbench.impls.strategies import group_cast
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.document_groups import DocumentGroup, Round
from spbench.impls.strategies.dynamic_cp import DynamicCP
from spbench.impls.strategies.fpdt import FPDT
from spbench.impls.strategies.group_cast import CastKeys, GroupCast
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.meetings import Meeting, Meetings
from spbench.impls.strategies.needed_rows import NeededRows
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from spbench.impls.strategies.upipe import Rounds, UPipe
from tests.measure.verify.planting import patching, planted


def _among(change: Callable[[Meetings], Meetings]) -> dict[str, Any]:
    """Attention among other keys than are meant."""

    def attend(self: Any, honest: Any, q: Any, k: Any, v: Any, meetings: Meetings, *sinks: Any) -> Tensor:
        o: Tensor = honest(q, k, v, change(meetings), *sinks)
        return o

    return {"heeds": HEEDS_ALL, "attend": attend}


def _attending(change: Callable[[Attended], Attended]) -> dict[str, Any]:
    return _among(lambda meetings: replace(meetings, attended=change(meetings.attended)))


class _CutAtEdges(Meetings):
    def of(self, owner: int) -> Meeting | None:
        return super().of(owner) if owner == self.rank else None


class _OffsetsIgnored(Meetings):
    def of(self, owner: int) -> Meeting | None:
        if (met := super().of(owner)) is None or owner == self.rank:
            return met
        mine, theirs, seen = met
        return mine, slice(0, theirs.stop - theirs.start), seen


class _WithoutHalo(Meetings):
    @property
    def halo(self) -> tuple[int, ...]:
        return ()


def _rounded_down(attended: Attended) -> Attended:
    ends = [0, *(end - end % 2 for end in attended.ends)]
    return Attended(tuple(b - a for a, b in pairwise(ends) if b > a))


def _places_in_the_sequence(self: Any, honest: Any, x: Tensor, dim: Any) -> Tensor:
    places = x.ndim == 1 and x.dtype is torch.int64
    held: Tensor = honest(torch.arange(len(x)) if places else x, dim)
    return held


# documents in softmax attention

# the causal mask alone, as trl #6843
DocumentsSeeEachOther = planted(RingAttention, **_attending(lambda _: CAUSAL))
# learned positions by the places in the sequence, not in the document; rotary embedding would be the same, as
# it knows distances alone
PositionsRunOn = planted(RingAttention, shard=_places_in_the_sequence)
# cu_seqlens of each rank's part alone, so that a document which goes on begins anew
DocumentsEndAtTheRanksEdge = planted(RingAttention, **_among(lambda each: _CutAtEdges(**vars(each))))
# keys from the first of a block on, wherever the document begins in it, as TransformerEngine #3351
KeyOffsetsIgnored = planted(RingAttention, **_among(lambda each: _OffsetsIgnored(**vars(each))))
# a document of 7 as one of 6, whose last position is the next one's: as TransformerEngine #1930
OddLengthsTakenForEven = planted(RingAttention, **_attending(_rounded_down))


# windows and sinks


def _sinks(change: Callable[[Any, Meetings, Tensor], Tensor]) -> dict[str, Any]:
    """Attention with other sinks."""

    def attend(
        self: Any, honest: Any, q: Any, k: Any, v: Any, meetings: Meetings, sinks: Tensor | None = None
    ) -> Any:
        return honest(q, k, v, meetings, None if sinks is None else change(self, meetings, sinks))

    return {"heeds": HEEDS_ALL, "attend": attend}


def _once_a_chunk(self: Any, meetings: Meetings, sinks: Tensor) -> Tensor:
    return sinks + math.log(sum(meetings.of(owner) is not None for owner in range(self.size)))


class _OtherRounds(Rounds):
    def of_rank(self, numbers: Tensor, rank: int) -> Tensor:
        return super().of_rank(numbers, rank).flip(0)


def _seen_whole(self: Any, honest: Any, chunks: Sequence[slice], attended: Attended) -> dict[Any, Any]:
    """Queries of a chunk see all keys of earlier chunks, as without a window."""
    of_window, whole = honest(chunks, attended), honest(chunks, CAUSAL)
    return {(i, j): of_window[i, j] if i == j else seen for (i, j), seen in whole.items()}


def _of_next_rank(self: Any, honest: Any, initial: Tensor) -> nn.Parameter:
    other = Shard(self.axes[0], 0, (self.rank + 1) % self.size, self.size)
    return mark_shard(honest(initial), other)


# keys j with i - window <= j: FlashAttention's window_size has one position less than the window
WindowOffByOne = planted(
    RingAttention, **_attending(lambda attended: replace(attended, window=(attended.window or 0) + 1))
)
# each rank's own keys alone
HaloForgotten = planted(AllGatherKV, **_among(lambda each: _WithoutHalo(**vars(each))))
# the sink in the denominator of each chunk's attention, before they are merged
SinkOnceAChunk = planted(RingAttention, **_sinks(_once_a_chunk))
SinkWithoutGradient = planted(RingAttention, **_sinks(lambda self, meetings, sinks: sinks.detach()))
# those of the next rank's heads
SinksOfOtherHeads = planted(
    Ulysses, of_own_heads=lambda self, honest, numbers: numbers.chunk(self.size)[(self.rank + 1) % self.size]
)
# those of the heads of other rounds, each round with as many
SinksOfOtherRounds = planted(
    UPipe, rounds=lambda self, honest, heads, groups: _OtherRounds(**vars(honest(heads, groups)))
)
ChunksSeenWhole = planted(FPDT, blocks_seen=_seen_whole)
# as SinksOfOtherHeads, of a parameter of which each rank has a part
SinksSplitOtherwise = planted(TensorParallel, feature_parameter=_of_next_rank)


# documents on groups of ranks


class DocumentComputedTwice(DynamicCP):
    """The last group computes a document of the first group too."""

    def _rounds(self, lengths: tuple[int, ...]) -> list[Round]:
        first, *others = super()._rounds(lengths)
        twice = tuple(sorted({*first[-1].documents, first[0].documents[0]}))
        return [(*first[:-1], first[-1]._replace(documents=twice)), *others]


class _OneDocumentARank(DynamicCP):
    def _rounds(self, lengths: tuple[int, ...]) -> list[Round]:
        return [tuple(DocumentGroup(range(n, n + 1), (n,)) for n in range(self.size))]


class DocumentMissingOnOneRank(_OneDocumentARank):
    """The last rank leaves its document out."""

    def _rounds(self, lengths: tuple[int, ...]) -> list[Round]:
        (groups,) = super()._rounds(lengths)
        return [(*groups[:-1], groups[-1]._replace(documents=()))]


class MeanOfTheRanksMeans(_OneDocumentARank):
    """The loss is the mean over ranks of each rank's mean over its own tokens."""

    def cross_entropy(self, logits: Tensor, *args: Any, **how: Any) -> Tensor:
        length = sum(self.packed.documents)
        token_loss: Tensor = super().cross_entropy(logits, *args, **how)
        return token_loss * (length / self.size / sum(self._rows(length)))


# keys and values only where they are needed


class _NotSent(CastKeys):
    """The memory for the rows of the nearest rank before keeps zeros."""

    def _arriving(self, own: Tensor) -> Iterator[tuple[range, Tensor]]:
        for part, rows in super()._arriving(own):
            self._by_owner(rows, part)[self.meetings.before(1)].zero_()
            yield part, rows


class _Returned(CastKeys):
    """The gradients of rows are added to others than are returned."""

    change: ClassVar[Callable[[Sequence[Any]], Sequence[Any]]]

    def _give_back(self, gradients: Tensor, part: range) -> Any:
        returning = super()._give_back(gradients, part)
        return returning._replace(parts=type(self).change(returning.parts))


class _NotReturned(_Returned):
    change = staticmethod(lambda parts: parts[1:])


class _AddedTwice(_Returned):
    change = staticmethod(lambda parts: [*parts, *parts[:1]])


class _EverythingBefore(NeededRows):
    def seen_by(self, rank: int) -> Numbers:
        return np.array([[0, self.held[rank].max()]])


class _EverythingSent(CastKeys):
    @cached_property
    def needed(self) -> NeededRows:
        honest = super().needed
        return _EverythingBefore(honest.held, honest.attended)


def _cast(cls: type[CastKeys]) -> dict[str, Any]:
    return {"heeds": HEEDS_ALL, "attend": patching(group_cast, CastKeys=cls)}


# the rows that one other rank has are missing
NeededRowsNotSent = planted(GroupCast, **_cast(_NotSent))
# a rank adds all gradients of its rows but those of one other rank's queries
GradientsNotReturned = planted(GroupCast, **_cast(_NotReturned))
# and adds those of one other rank's queries once more
GradientsAddedTwice = planted(GroupCast, **_cast(_AddedTwice))
# every value is right, but rows are sent of which no query sees the keys
MoreRowsThanAreNeeded = planted(GroupCast, **_cast(_EverythingSent))


# documents in linear attention and gated recurrences


def _starting_at(change: Callable[[Sequence[int], int], Sequence[int]]) -> dict[str, Any]:
    """A recurrence whose documents begin elsewhere; ``change`` is given the positions and the length."""

    def gated_recurrence(self: Any, honest: Any, *inputs: Any, starts: Sequence[int] = (), **how: Any) -> Any:
        return honest(*inputs, starts=change(starts, inputs[1].shape[1]), **how)

    return {"heeds": HEEDS_ALL, "gated_recurrence": gated_recurrence}


def _of_chunk(change: Callable[[Chunk], Chunk]) -> dict[str, Any]:
    def chunk(self: Any, honest: Any, attended: Attended, length: int) -> Chunk | None:
        right: Chunk | None = honest(attended, length)
        return right and change(right)

    return {"heeds": HEEDS_ALL, "chunk": chunk}


def _no_starts(self: Any, honest: Any, *of: Any) -> Sequence[int]:
    self.right = honest(*of)
    return ()


# a state that goes on from document to document within a rank
StateNotReset = planted(Lasp, **_of_chunk(lambda chunk: replace(chunk, lengths=(sum(chunk.lengths),))))
# the state of the rank before, also where it ends with its document
StateNotResetAtTheRanksEdge = planted(Lasp, **_of_chunk(lambda chunk: replace(chunk, goes_on=True)))
# a gated recurrence that knows of no documents
StateCarriedAcrossDocuments = planted(Lasp2, **_starting_at(lambda starts, length: ()))
# a document that begins with a rank's first position gets the state of the rank before
StateCarriedOverTheRanksEdge = planted(
    Lasp, **_starting_at(lambda starts, length: [start for start in starts if start])
)
# the second position of a document is the first without the state of the one before
DecayResetOneTokenLate = planted(
    Lasp2, **_starting_at(lambda starts, length: [start + 1 for start in starts if start + 1 < length])
)
# only the recurrence knows of documents, as fla's layers whose causal_conv1d gets no cu_seqlens
ConvolutionOverDocuments = planted(
    Lasp,
    heeds=HEEDS_ALL,
    document_starts=_no_starts,
    gated_recurrence=lambda self, honest, *inputs, starts=(), **how: honest(
        *inputs, starts=self.right, **how
    ),
)
# all rows before a rank's first position, also those of the document before
ConvolutionOverTheRanksEdge = planted(
    Lasp2,
    heeds=HEEDS_ALL,
    document_starts=lambda self, honest, *of: [start for start in honest(*of) if start >= 0],
)

#: of gated recurrences
OF_RECURRENCES = [
    *(StateCarriedAcrossDocuments, StateCarriedOverTheRanksEdge, DecayResetOneTokenLate),
    *(ConvolutionOverDocuments, ConvolutionOverTheRanksEdge),
]
