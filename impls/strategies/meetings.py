"""Which queries of a rank see which keys of each rank, by the placement of positions.

Without packed documents and windows this follows from the places of two ranks (:func:`meeting`); else from
the runs of positions that each rank has and from what these attend to.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from spbench.impls.attended import CAUSAL, Attended, Interval, Ranges
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.strategies.placements import BALANCED, intervals
from spbench.impls.unlike_work import ALL_LOWER, work_of

ALL = slice(None)

#: (queries, keys, seen): which of a rank's queries see which of an owner's keys, and what of these
Meeting = tuple[slice, slice, Seen]


def meeting(placement: str | None, rank: int, owner: int, length: int) -> tuple[slice, slice, bool] | None:
    """Which of a rank's ``length`` queries see which of an owner's ``length`` keys: (queries, keys, causal).

    All of these queries see all of these keys or, if causal, query i of these sees keys j <= i of these.
    None: no query sees any. ``placement`` None: there is no mask. All owners of lower rank give the same
    meeting, and so do all of higher rank.
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


def halo_rows(window: int, length: int, size: int) -> tuple[int, ...]:
    """For each chunk of ``length`` before a rank's own, the nearest first: how many of its last positions the
    rank's queries see in a window. These are window - 1 in all, of at most ``size`` - 1 chunks."""
    chunks = min(size - 1, -(-(window - 1) // length))
    return tuple(min(length, window - 1 - i * length) for i in range(chunks))


@lru_cache(maxsize=128)
def _met(
    placement: str, packed: Attended, attended: Attended, rank: int, owner: int, size: int, length: int
) -> tuple[Interval, Interval, Seen] | None:
    """As :meth:`Meetings.of`, from the runs of positions of each rank."""
    held = intervals(placement, size, length, packed)
    ranges = attended.ranges(held[rank], held[owner])
    if not ranges:
        return None
    mine, theirs = ranges.queries, ranges.keys
    ranges = ranges.moved(mine[0], theirs[0])
    if len(ranges) == 1:
        (only,) = ranges
        if only.whole or only.causal:
            return mine, theirs, not only.whole
    return mine, theirs, ranges


@lru_cache(maxsize=64)
def _numbered(
    placement: str, packed: Attended, attended: Attended, rank: int, size: int, length: int
) -> Sequence[int]:
    numbers: dict[Hashable, int] = {}
    met = (_met(placement, packed, attended, rank, owner, size, length) for owner in range(size))
    return [numbers.setdefault(each, len(numbers)) for each in met]


@dataclass(frozen=True)
class Meetings:
    """Which queries of a rank see which keys of each rank.

    Attributes:
        placement: of the positions; None: there is no mask, and each query sees each key.
        rank, size: this rank, and the number of ranks.
        length: positions of each rank.
        attended: which positions this layer attends to, beside the causal mask.
        packed: the same for the placement, which all layers share; None: ``attended``.
    """

    placement: str | None
    rank: int
    size: int
    length: int
    attended: Attended = CAUSAL
    packed: Attended | None = None

    @property
    def placed_by(self) -> Attended:
        """The ``attended`` that decides the placement."""
        return self.attended if self.packed is None else self.packed

    @property
    def halo(self) -> tuple[int, ...] | None:
        """For each chunk before the rank's own, the nearest first: how many of its last keys the queries see,
        where they see no other keys of other ranks (a window over contiguous chunks). None: elsewhere."""
        if self.placement != "contiguous" or self.attended.window is None:
            return None
        return halo_rows(self.attended.window, self.length, self.size)

    @property
    def regular(self) -> bool:
        """Whether the placement of two ranks alone decides their meeting: :func:`meeting`."""
        return self.placement is None or (self.attended.plain and self.placement not in BALANCED)

    def of(self, owner: int) -> Meeting | None:
        """The meeting of the rank's queries with the keys of one rank; None: no query sees any."""
        if self.regular:
            return meeting(self.placement, self.rank, owner, self.length)
        assert self.placement is not None
        met = _met(self.placement, self.placed_by, self.attended, self.rank, owner, self.size, self.length)
        if met is None:
            return None
        mine, theirs, seen = met
        return slice(*mine), slice(*theirs), seen

    def of_all(self) -> tuple[Interval, Ranges]:
        """The meeting with the keys of several ranks, from the first rank whose keys a query sees to the
        last: (these ranks, ranges)."""
        assert self.placement is not None
        held = intervals(self.placement, self.size, self.length, self.placed_by)
        ranges = self.attended.ranges(held[self.rank], np.concatenate(held))
        start, end = ranges.keys
        first = start // self.length
        return (first, -(-end // self.length)), ranges.moved(0, first * self.length)

    def of_halo(self) -> Ranges:
        """The meeting with the keys of the halo, the farthest first, and the rank's own after them."""
        assert self.halo is not None
        start, rows = self.rank * self.length, sum(self.halo)
        first = max(0, start - rows)
        end = start + self.length
        ranges = self.attended.ranges([(start, end)], [(first, end)])
        return ranges.moved(0, start - rows - first)

    def work_on(self, owner: int, *, joint: bool = False) -> AbstractContextManager[None]:
        """A context for computing with the keys of an owner, or if ``joint`` with the keys of all ranks from
        it to this one. It marks the work that lower ranks have less of (:func:`work_of`)."""
        if self.placement != "contiguous" or not self.regular or owner >= self.rank:
            return nullcontext()
        return work_of(ALL_LOWER if joint else self.rank)

    def before(self, chunks: int) -> int:
        """The rank ``chunks`` places before this one, round the ring."""
        return (self.rank - chunks) % self.size

    def depends_on(self, owner: int) -> Hashable:
        """What the work on an owner's block depends on, beside whether the owner is a lower rank."""
        return None if self.regular else self._alike[owner]

    @cached_property
    def _alike(self) -> Sequence[int]:
        """A number for each owner, equal for owners whose keys meet the queries in the same way."""
        assert self.placement is not None
        return _numbered(self.placement, self.placed_by, self.attended, self.rank, self.size, self.length)
