"""Strategies that treat packed documents wrongly, each as public code has done. None is registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.kernels.packed_linear_attention import Chunk
from spbench.impls.layout import HEEDS_ALL
from spbench.impls.strategies.base import SequenceDim
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.meetings import Meeting, Meetings
from spbench.impls.strategies.ring_attention import RingAttention


class DocumentsSeeEachOther(RingAttention):
    """The causal mask alone, as trl #6843."""

    heeds = HEEDS_ALL

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        return super().attend(q, k, v, replace(meetings, attended=CAUSAL))


class PositionsRunOn(RingAttention):
    """Learned positions by the places in the sequence, not in the document; rotary embedding would be the
    same, as it knows distances alone."""

    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        places = x.ndim == 1 and x.dtype is torch.int64
        return super().shard(torch.arange(len(x)) if places else x, dim)


class _CutAtEdges(Meetings):
    def of(self, owner: int) -> Meeting | None:
        return super().of(owner) if owner == self.rank else None


class _OffsetsIgnored(Meetings):
    def of(self, owner: int) -> Meeting | None:
        if (met := super().of(owner)) is None or owner == self.rank:
            return met
        mine, theirs, seen = met
        return mine, slice(0, theirs.stop - theirs.start), seen


class _OwnMeetings(RingAttention):
    """Ring Attention with other meetings."""

    heeds = HEEDS_ALL
    cls: type[Meetings]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        return super().attend(q, k, v, self.cls(**vars(meetings)))


class DocumentsEndAtTheRanksEdge(_OwnMeetings):
    """cu_seqlens of each rank's part alone, so that a document which goes on begins anew."""

    cls = _CutAtEdges


class KeyOffsetsIgnored(_OwnMeetings):
    """Keys from the first of a block on, wherever the document begins in it, as TransformerEngine #3351."""

    cls = _OffsetsIgnored


class StateNotReset(Lasp):
    """A state that goes on from document to document within a rank."""

    heeds = HEEDS_ALL

    def chunk(self, attended: Attended, length: int) -> Chunk | None:
        found = super().chunk(attended, length)
        return found and Chunk((length,), found.goes_on, found.continued)


class StateNotResetAtTheRanksEdge(Lasp):
    """The state of the rank before, also where it ends with its document."""

    heeds = HEEDS_ALL

    def chunk(self, attended: Attended, length: int) -> Chunk | None:
        found = super().chunk(attended, length)
        return found and replace(found, goes_on=True)


class StateCarriedAcrossDocuments(Lasp2):
    """A gated recurrence that knows of no documents."""

    heeds = HEEDS_ALL

    def gated_recurrence(self, *inputs: Any, starts: Sequence[int] = ()) -> Tensor:
        return super().gated_recurrence(*inputs)


class StateCarriedOverTheRanksEdge(Lasp):
    """A document that begins with a rank's first position gets the state of the rank before."""

    heeds = HEEDS_ALL

    def gated_recurrence(self, *inputs: Any, starts: Sequence[int] = ()) -> Tensor:
        return super().gated_recurrence(*inputs, starts=[start for start in starts if start])


class DecayResetOneTokenLate(Lasp2):
    """The second position of a document is the first without the state of the one before."""

    heeds = HEEDS_ALL

    def gated_recurrence(self, *inputs: Any, starts: Sequence[int] = ()) -> Tensor:
        late = [start + 1 for start in starts if start + 1 < inputs[-1].shape[1]]
        return super().gated_recurrence(*inputs, starts=late)


class ConvolutionOverDocuments(Lasp):
    """Only the recurrence knows of documents, as fla's layers whose causal_conv1d gets no cu_seqlens."""

    heeds = HEEDS_ALL

    def document_starts(self, attended: Attended, length: int) -> Sequence[int]:
        self.found = super().document_starts(attended, length)
        return ()

    def gated_recurrence(self, *inputs: Any, starts: Sequence[int] = ()) -> Tensor:
        return super().gated_recurrence(*inputs, starts=self.found)


class ConvolutionOverTheRanksEdge(Lasp2):
    """All rows before a rank's first position, also those of the document before."""

    heeds = HEEDS_ALL

    def document_starts(self, attended: Attended, length: int) -> Sequence[int]:
        return [start for start in super().document_starts(attended, length) if start >= 0]


class OddLengthsTakenForEven(RingAttention):
    """A document of 7 as one of 6, whose last position is the next one's: as TransformerEngine #1930."""

    heeds = HEEDS_ALL

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        ends = [0, *(end - end % 2 for end in meetings.attended.ends)]
        lengths = tuple(b - a for a, b in pairwise(ends) if b > a)
        return super().attend(q, k, v, replace(meetings, attended=Attended(lengths)))


#: of gated recurrences
OF_RECURRENCES = [
    StateCarriedAcrossDocuments,
    StateCarriedOverTheRanksEdge,
    DecayResetOneTokenLate,
    ConvolutionOverDocuments,
    ConvolutionOverTheRanksEdge,
]
