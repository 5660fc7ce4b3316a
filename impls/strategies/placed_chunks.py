"""Sequence chunks by a placement of positions on ranks, whose queries meet the keys of all ranks."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placements import BALANCED, PLACEMENTS, intervals
from spbench.impls.strategies.sequence_chunks import GridChunks, GridOptions, chunk_of


@dataclass(frozen=True)
class PlacementOptions(GridOptions):
    """Options that choose a rank's positions of a sequence or part of a grid. Attention along dims of a grid
    other than ``grid_dim`` needs no message.

    Attributes:
        placement: the placement of positions on ranks, one of ``placements``; linear attention, recurrences
            and grids take only "contiguous".
    """

    placement: str = "contiguous"

    words: ClassVar[Mapping[str, Collection[str]]] = {"placement": PLACEMENTS}

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """See :meth:`Options.searched`. Without a causal mask the placement changes nothing. Only packed
        sequences have placements by document lengths, and they have no striped placement."""
        of_one_text = ("zigzag", "contiguous", "striped")
        of_documents = ("by_work", "zigzag_by_document", "zigzag", "contiguous")
        for placement in of_documents if "documents" in heeded else of_one_text:
            if placement in cls.words["placement"]:
                yield {"placement": placement}


@dataclass(frozen=True)
class DocumentPlacementOptions(PlacementOptions):
    """:class:`PlacementOptions` that also take the placements by document lengths, BALANCED."""

    words = {"placement": (*PLACEMENTS, *BALANCED)}


class PlacedChunks(GridChunks):
    """Sequence chunks by a placement; a derived class implements softmax attention to the keys of all ranks
    in :meth:`attend`."""

    options_type = PlacementOptions
    options: PlacementOptions

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        """Softmax attention of this rank's queries to the keys of all ranks, two or more: q, k, v [B, Z, L/N,
        A] -> [B, Z, L/N, A], scores scaled by A**-0.5. ``meetings`` says which keys of each rank the queries
        see. Classes whose attention has sinks take these as one more argument."""
        raise NotImplementedError

    def meetings(self, q: Tensor, placement: str | None, attended: Attended = CAUSAL) -> Meetings:
        """The meetings of this rank's queries [B, Z, L/N, A] with the keys of all ranks."""
        return Meetings(placement, self.rank, self.size, q.shape[2], attended, self.packed)

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        # With a causal mask the ranks' programs differ, but all ranks send the same bytes, and none attends
        # to more keys than the last rank. So all ranks are one set, and the last rank is traced for the set.
        return [[size - 1, *range(size - 1)]]

    @property
    def length_multiple(self) -> int:
        zigzag = self.options.placement in ("zigzag", "zigzag_by_document")
        chunks = 2 * self.size if zigzag and self.size > 1 else 1
        return math.lcm(super().length_multiple, chunks)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        placement, others = self.options.placement, self.options.words["placement"]
        for site in sites:
            if site.kind == "attention" and "mask_rows" in site.dims:
                raise Unsupported(f"{self.name} has no masks but the causal one", "use ring_self_attention")
            what = {"linear_attention": "linear attention", "gated_recurrence": "a recurrence"}.get(site.kind)
            if (what or site.kind == "full_attention") and placement != "contiguous":
                what = what or "a grid"
                raise Unsupported(f"{what} has no {placement} placement", "use placement contiguous")
            if placement == "striped" and ("documents" in site.dims or "window" in site.dims):
                raise Unsupported(
                    "packed documents and windows have no striped placement",
                    f"use placement {' or '.join(other for other in others if other != placement)}",
                )

    def own(self, x: Tensor, dim: int) -> Tensor:
        if self.options.placement == "contiguous":
            return super().own(x, dim)
        if self.options.placement in BALANCED and self.size > 1:
            held = intervals(self.options.placement, self.size, x.shape[dim] // self.size, self.packed)
            # alternately the gap before a run, and the run: one operator cuts thousands of runs
            cuts = np.diff(held[self.rank].ravel(), prepend=0, append=x.shape[dim])
            return torch.cat(x.split(cuts.tolist(), dim)[1::2], dim)
        if self.options.placement == "striped":
            return x.unflatten(dim, (-1, self.size)).select(dim + 1, self.rank)
        places, parts = (self.rank, 2 * self.size - 1 - self.rank), 2 * self.size
        return torch.cat([chunk_of(x, dim, place, parts) for place in places], dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        if self.size == 1:
            return super().attention(q, k, v, mask, dropout=dropout, softmax=softmax)
        if mask is not None or dropout:
            raise Unsupported(f"{self.name} has no masks and no dropout of attention", "use ulysses")
        return self.attend(q, k, v, self.meetings(q, None))

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        if self.size == 1:
            return super().causal_attention(q, k, v, attended, sinks)
        meetings = self.meetings(q, self.options.placement, attended)
        return self.attend(q, k, v, meetings, *([] if sinks is None else [sinks]))

    def attended_pairs(self, attended: Attended, length: int) -> int:
        if self.size == 1 or self.options.placement == "striped":  # whose stripes are almost even
            return super().attended_pairs(attended, length) // self.size
        held = intervals(self.options.placement, self.size, length // self.size, attended)
        return int(attended.pairs(held[self.rank]).sum())

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.size == 1:
            return super().full_attention(q, k, v)
        return self.attend(q, k, v, self.meetings(q, None))
