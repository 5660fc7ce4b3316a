"""Where the positions of a sequence lie on ranks whose queries meet the keys of all ranks.

Under a causal mask, where queries see no later key, the placement of positions decides how even work is:
- "contiguous", chunk r of N: rank r has r + 1 blocks to attend to, so the last rank works all the time;
- "striped", positions r, r + N, r + 2N, ...: about half of every block, for every rank (Striped Attention,
  arXiv 2311.09431);
- "zigzag", chunks r and 2N-1-r of 2N: half of every block of others, exactly (The Llama 3 Herd of Models,
  arXiv 2407.21783, section 3.3.2; Megatron-LM's context parallelism).

These balance one long text. Packed documents are even on ranks by one of BALANCED, which know their lengths:
- "zigzag_by_document", chunks r and 2N-1-r of 2N of each document (Transformer Engine's thd layout, which
  pads each document to a multiple of 2N). Here nothing is padded: what is left of all documents, less than 2N
  positions of each, is one sequence, of which each rank has a contiguous part;
- "by_work", chunks of a small size, each to the rank that has the least to attend to so far, the heaviest
  first (as MagiAttention's dispatch, arXiv 2505.13211, section 4.1).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended, Interval, Range
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.sequence_chunks import GridChunks, GridOptions, chunk_of

PLACEMENTS = ("contiguous", "striped", "zigzag")
#: placements by the lengths of documents
BALANCED = ("zigzag_by_document", "by_work")
ALL = slice(None)

#: chunks of a rank under "by_work", where they divide its positions
CHUNKS_BY_WORK = 16

#: (queries, keys, seen): which of a rank's queries see which of an owner's keys, and what of these
Meeting = tuple[slice, slice, Seen]


def meeting(placement: str | None, rank: int, owner: int, length: int) -> tuple[slice, slice, bool] | None:
    """Which of a rank's ``length`` queries see which of an owner's ``length`` keys: (queries, keys, causal).
    All of these queries see all of these keys or, if causal, query i of these sees keys j <= i of these.
    None: no query sees any. ``placement`` None: there is no mask.

    All owners of lower rank are met alike, and all of higher rank.
    """
    if placement is None:
        return ALL, ALL, False
    if owner == rank:
        return ALL, ALL, True
    if placement == "contiguous":
        return (ALL, ALL, False) if owner < rank else None
    if placement == "striped":
        if owner < rank:
            return ALL, ALL, True
        # place i of an owner to the right comes after place i of the rank's, so i sees the places before i
        return (slice(1, None), slice(-1), True) if length > 1 else None
    half = length // 2
    # the owner's first chunk lies before both of the rank's, or both of the owner's between the rank's two
    return (ALL, slice(half), False) if owner < rank else (slice(half, None), ALL, False)


@lru_cache(maxsize=32)
def intervals(placement: str, size: int, length: int, attended: Attended) -> tuple[tuple[Interval, ...], ...]:
    """The positions of each of ``size`` ranks, ``length`` each, as runs in the order in which it holds them;
    not of "striped", which has no runs."""
    if placement == "contiguous":
        return tuple(((r * length, (r + 1) * length),) for r in range(size))
    if placement == "zigzag":
        half = length // 2
        places = [(r, 2 * size - 1 - r) for r in range(size)]
        return tuple(tuple((p * half, (p + 1) * half) for p in two) for two in places)
    by_rank = _zigzag_by_document if placement == "zigzag_by_document" else _by_work
    return tuple(tuple(runs) for runs in by_rank(size, length, attended))


def _zigzag_by_document(size: int, length: int, attended: Attended) -> list[list[Interval]]:
    by_rank: list[list[Interval]] = [[] for _ in range(size)]
    left: list[Interval] = []
    for _, _, (start, end) in attended.within_documents([(0, size * length)]):
        part = (end - start) // (2 * size)
        for rank, runs in enumerate(by_rank):
            if part:
                first, second = start + rank * part, start + (2 * size - 1 - rank) * part
                runs += [(first, first + part), (second, second + part)]
        if start + 2 * size * part < end:
            left.append((start + 2 * size * part, end))
    room = sum(end - start for start, end in left) // size
    rank, free = 0, room
    for start, end in left:
        while start < end:
            if not free:
                rank, free = rank + 1, room
            part = min(free, end - start)
            by_rank[rank].append((start, start + part))
            start, free = start + part, free - part
    return [_joined(sorted(runs)) for runs in by_rank]


def _by_work(size: int, length: int, attended: Attended) -> list[list[Interval]]:
    each = math.gcd(length, CHUNKS_BY_WORK)
    part = length // each
    chunks = [(c * part, (c + 1) * part) for c in range(size * each)]
    work = {chunk: attended.pairs([chunk]) for chunk in chunks}
    by_rank: list[list[Interval]] = [[] for _ in range(size)]
    free = [(0, rank) for rank in range(size)]
    for chunk in sorted(chunks, key=lambda chunk: (-work[chunk], chunk)):
        so_far, rank = heapq.heappop(free)
        by_rank[rank].append(chunk)
        if len(by_rank[rank]) < each:
            heapq.heappush(free, (so_far + work[chunk], rank))
    return [_joined(sorted(runs)) for runs in by_rank]


def _joined(runs: Sequence[Interval]) -> list[Interval]:
    """Runs in order, those that follow each other without a gap as one."""
    found: list[Interval] = []
    for start, end in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


@lru_cache(maxsize=128)
def _met(
    placement: str, attended: Attended, rank: int, owner: int, size: int, length: int
) -> tuple[Interval, Interval, Seen] | None:
    """As :meth:`Meetings.of`, from what each rank has of the sequence."""
    held = intervals(placement, size, length, attended)
    found = attended.ranges(held[rank], held[owner])
    if not found:
        return None
    mine = min(r.first_query for r in found), max(r.first_query + r.queries for r in found)
    theirs = min(r.first_key for r in found), max(r.first_key + r.keys for r in found)
    found = tuple(r.moved(mine[0], theirs[0]) for r in found)
    if len(found) == 1 and (found[0].whole or found[0].causal):
        return mine, theirs, not found[0].whole
    return mine, theirs, found


@lru_cache(maxsize=64)
def _numbered(placement: str, attended: Attended, rank: int, size: int, length: int) -> Sequence[int]:
    numbers: dict[Hashable, int] = {}
    met = (_met(placement, attended, rank, owner, size, length) for owner in range(size))
    return [numbers.setdefault(each, len(numbers)) for each in met]


@dataclass(frozen=True)
class Meetings:
    """Which queries of a rank see which keys of each rank.

    Attributes:
        placement: of the positions; None: there is no mask, and each query sees each key.
        rank, size: of the ranks.
        length: positions that each of them has.
        attended: what positions attend to, beside the causal mask.
    """

    placement: str | None
    rank: int
    size: int
    length: int
    attended: Attended = CAUSAL

    @property
    def regular(self) -> bool:
        """Whether they follow from the places of two ranks alone: :func:`meeting`."""
        return self.placement is None or (self.attended.plain and self.placement not in BALANCED)

    def of(self, owner: int) -> Meeting | None:
        """Of the keys of one rank; None: no query sees any."""
        if self.regular:
            return meeting(self.placement, self.rank, owner, self.length)
        assert self.placement is not None
        found = _met(self.placement, self.attended, self.rank, owner, self.size, self.length)
        if found is None:
            return None
        mine, theirs, seen = found
        return slice(*mine), slice(*theirs), seen

    def of_all(self) -> tuple[Interval, tuple[Range, ...]]:
        """What the rank's queries see of the keys of several ranks, one after another from the first rank of
        which they see any to the last: (these ranks, ranges)."""
        assert self.placement is not None
        held = intervals(self.placement, self.size, self.length, self.attended)
        ranges = self.attended.ranges(held[self.rank], [run for runs in held for run in runs])
        first = min(r.first_key for r in ranges) // self.length
        last = max(r.first_key + r.keys - 1 for r in ranges) // self.length
        return (first, last + 1), tuple(r.moved(0, first * self.length) for r in ranges)

    def depends_on(self, owner: int) -> Hashable:
        """What the work on an owner's block depends on, beside whether the owner is a lower rank."""
        return None if self.regular else self._alike[owner]

    @cached_property
    def _alike(self) -> Sequence[int]:
        """A number for each owner, the same for those whose keys meet the queries alike."""
        assert self.placement is not None
        return _numbered(self.placement, self.attended, self.rank, self.size, self.length)


@dataclass(frozen=True)
class PlacementOptions(GridOptions):
    """Which positions of a sequence, and which part of a grid, a rank has; attention along other dims of a
    grid than ``grid_dim`` needs no message.

    Attributes:
        placement: of positions on ranks, one of ``placements``; linear attention, recurrences and grids take
            contiguous chunks only.
    """

    placement: str = "contiguous"

    #: what ``placement`` may be
    placements: ClassVar[tuple[str, ...]] = PLACEMENTS

    @classmethod
    def searched(cls) -> Iterator[Mapping[str, Any]]:
        """See :meth:`Options.searched`; without a causal mask the placement changes nothing."""
        for placement in ("zigzag", "contiguous", "striped"):
            yield {"placement": placement}

    def __post_init__(self) -> None:
        check_choices(self, {"placement": self.placements})


@dataclass(frozen=True)
class DocumentPlacementOptions(PlacementOptions):
    """As :class:`PlacementOptions`, with the placements of BALANCED."""

    placements = (*PLACEMENTS, *BALANCED)


class PlacedChunks(GridChunks):
    """Sequence chunks of a placement, whose softmax attention to the keys of all ranks a derived class makes
    in :meth:`attend`."""

    options_type = PlacementOptions
    options: PlacementOptions

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        """Softmax attention of this rank's queries to the keys of all ranks, of which there are two or more:
        q, k, v [B, Z, L/N, A] -> [B, Z, L/N, A], scores scaled by A**-0.5; what is seen of the keys of each
        rank is that of ``meetings``."""
        raise NotImplementedError

    def meetings(self, q: Tensor, placement: str | None, attended: Attended = CAUSAL) -> Meetings:
        """Of this rank's queries [B, Z, L/N, A] with the keys of all."""
        return Meetings(placement, self.rank, self.size, q.shape[2], attended)

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        # With a causal mask the ranks' programs differ, but all send the same, and none attends to more keys
        # than the last rank. So all ranks are one set, and the last rank stands for it.
        return [[size - 1, *range(size - 1)]]

    @property
    def length_multiple(self) -> int:
        zigzag = self.options.placement in ("zigzag", "zigzag_by_document")
        chunks = 2 * self.size if zigzag and self.size > 1 else 1
        return math.lcm(super().length_multiple, chunks)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        placement = self.options.placement
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
                    f"use placement {' or '.join(p for p in self.options.placements if p != placement)}",
                )

    def own(self, x: Tensor, dim: int) -> Tensor:
        if self.options.placement == "contiguous":
            return super().own(x, dim)
        if self.options.placement in BALANCED and self.size > 1:
            held = intervals(self.options.placement, self.size, x.shape[dim] // self.size, self.packed)
            return torch.cat([x.narrow(dim, start, end - start) for start, end in held[self.rank]], dim)
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

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL) -> Tensor:
        if self.size == 1:
            return super().causal_attention(q, k, v, attended)
        return self.attend(q, k, v, self.meetings(q, self.options.placement, attended))

    def attended_pairs(self, attended: Attended, length: int) -> int:
        if self.size == 1 or self.options.placement == "striped":  # whose stripes are almost even
            return super().attended_pairs(attended, length) // self.size
        held = intervals(self.options.placement, self.size, length // self.size, attended)
        return attended.pairs(held[self.rank])

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.size == 1:
            return super().full_attention(q, k, v)
        return self.attend(q, k, v, self.meetings(q, None))
