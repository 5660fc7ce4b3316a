"""Meetings: which queries of a rank see which keys of each rank, by the placement of positions.

Without packed documents and windows a meeting follows from the numbers of two ranks (:func:`meeting`); else
from the runs of positions that each rank has and from the positions to which these attend.
"""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from spbench.impls.attended import CAUSAL, Attended, Interval, Ranges
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.observed_work import ALL_LOWER, work_of
from spbench.impls.strategies.placements import BALANCED, intervals

ALL = slice(None)

#: (queries, keys, seen): slices of a rank's queries and an owner's keys that meet, and which keys each sees
Meeting = tuple[slice, slice, Seen]
#: the placements of queries and of keys
Placements = tuple[str, str]


def meeting(placement: str | None, rank: int, owner: int, length: int) -> tuple[slice, slice, bool] | None:
    """(queries, keys, causal): slices of a rank's ``length`` queries and of an owner's ``length`` keys that
    meet.

    Each query of the slice sees each key of the slice or, if causal, query i sees keys j <= i. None: no query
    sees any key. ``placement`` None: there is no mask. All owners of lower rank give the same meeting, and
    all owners of higher rank do.
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
        # position i of a higher rank comes after this rank's position i, which sees the positions before i
        return (slice(1, None), slice(-1), True) if length > 1 else None
    half = length // 2
    # the owner's first chunk is before both of the rank's, or both of the owner's are between the rank's two
    return (ALL, slice(half), False) if owner < rank else (slice(half, None), ALL, False)


def halo_rows(window: int, length: int, size: int) -> tuple[int, ...]:
    """The number of last positions that a rank's queries see of each chunk of ``length`` before the rank's,
    the nearest first. The sum is window - 1, over at most ``size`` - 1 chunks."""
    chunks = min(size - 1, -(-(window - 1) // length))
    return tuple(min(length, window - 1 - i * length) for i in range(chunks))


@lru_cache(maxsize=128)
def _met(
    placements: Placements,
    packed: Attended,
    attended: Attended,
    rank: int,
    owner: int,
    size: int,
    length: int,
) -> tuple[Interval, Interval, Seen] | None:
    """The value of :meth:`Meetings.of`, from the runs of positions of two ranks."""
    queries, keys = (intervals(each, size, length, packed) for each in placements)
    ranges = attended.ranges(queries[rank], keys[owner])
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
    placements: Placements, packed: Attended, attended: Attended, rank: int, size: int, length: int
) -> Sequence[int]:
    numbers: dict[Hashable, int] = {}
    met = (_met(placements, packed, attended, rank, owner, size, length) for owner in range(size))
    return [numbers.setdefault(each, len(numbers)) for each in met]


@dataclass(frozen=True)
class Meetings:
    """The meetings of one rank: which of its queries see which keys of each rank.

    Attributes:
        placement: the placement of the positions; None: there is no mask, and each query sees each key.
        rank, size: this rank, and the number of ranks.
        length: number of positions of each rank.
        attended: the limits of this layer's attention in addition to the causal mask.
        packed: the limits by which the placement is chosen, which all layers share; None: ``attended``.
        keys: the placement of the keys; None: that of the queries, ``placement``.
    """

    placement: str | None
    rank: int
    size: int
    length: int
    attended: Attended = CAUSAL
    packed: Attended | None = None
    keys: str | None = None

    @property
    def placements(self) -> Placements:
        """The placements of queries and of keys, where there is a mask."""
        assert self.placement is not None
        return self.placement, self.keys or self.placement

    @property
    def placed_by(self) -> Attended:
        """The limits of attention by which the placement is chosen."""
        return self.attended if self.packed is None else self.packed

    @property
    def halo(self) -> tuple[int, ...] | None:
        """For a window over contiguous chunks: how many of the last keys of each chunk before the rank's own
        the queries see, the nearest chunk first. None: there is no window, or another placement."""
        if self.placement != "contiguous" or self.attended.window is None:
            return None
        return halo_rows(self.attended.window, self.length, self.size)

    @property
    def regular(self) -> bool:
        """Whether a meeting follows from the placement and the numbers of two ranks (:func:`meeting`)."""
        if self.placement is None:
            return True
        return self.keys is None and self.attended.plain and self.placement not in BALANCED

    def of(self, owner: int) -> Meeting | None:
        """The meeting of the rank's queries with the keys of rank ``owner``; None: no query sees a key."""
        if self.regular:
            return meeting(self.placement, self.rank, owner, self.length)
        met = _met(self.placements, self.placed_by, self.attended, self.rank, owner, self.size, self.length)
        if met is None:
            return None
        mine, theirs, seen = met
        return slice(*mine), slice(*theirs), seen

    def of_all(self) -> tuple[Interval, Ranges]:
        """(ranks, ranges): the first rank whose keys a query sees, and the end after the last one; and the
        ranges of these ranks' keys that the queries see."""
        queries, keys = (intervals(each, self.size, self.length, self.placed_by) for each in self.placements)
        ranges = self.attended.ranges(queries[self.rank], np.concatenate(keys))
        start, end = ranges.keys
        first = start // self.length
        return (first, -(-end // self.length)), ranges.moved(0, first * self.length)

    def of_halo(self) -> Ranges:
        """The ranges that the queries see of the halo's keys, the farthest first, and the rank's own keys."""
        assert self.halo is not None
        start, rows = self.rank * self.length, sum(self.halo)
        first = max(0, start - rows)
        end = start + self.length
        ranges = self.attended.ranges([(start, end)], [(first, end)])
        return ranges.moved(0, start - rows - first)

    def work_on(self, owner: int, *, joint: bool = False) -> AbstractContextManager[None]:
        """A context for computing with the keys of an owner, or if ``joint`` with the keys of all ranks from
        the owner to this rank. The context marks work of which lower ranks have less (:func:`work_of`)."""
        if self.placement != "contiguous" or not self.regular or owner >= self.rank:
            return nullcontext()
        return work_of(ALL_LOWER if joint else self.rank)

    def before(self, chunks: int) -> int:
        """The number of the rank that is ``chunks`` places before this rank on the ring."""
        return (self.rank - chunks) % self.size

    def depends_on(self, owner: int) -> Hashable:
        """A key that is equal for owners of the same side whose blocks take the same work."""
        return None if self.regular else self._alike[owner]

    @cached_property
    def _alike(self) -> Sequence[int]:
        """A number for each owner, equal for owners whose keys meet the queries in the same way."""
        return _numbered(self.placements, self.placed_by, self.attended, self.rank, self.size, self.length)
