"""Which rows of keys and values each rank needs of each other rank, by the mask and the placement.

A rank needs the keys that one of its queries sees. These are some runs of positions
(:meth:`Attended.keys_of`), and of each owner's rows those whose positions lie in these runs. No row is needed
twice, so a rank that sends each other rank the rows it needs sends as few bytes as there can be, and at most
those of an all-gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from spbench.impls.attended import CAUSAL, Attended, Numbers, Ranges
from spbench.impls.layout import Site
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placements import intervals


@dataclass(frozen=True, eq=False)
class NeededRows:
    """The needed rows of all pairs of ranks.

    Attributes:
        held: the positions that each rank has, as runs [n, 2] in the order in which the rank holds them.
        attended: the positions to which a position attends.
    """

    held: Sequence[Numbers]
    attended: Attended
    _seen: dict[int, Numbers] = field(default_factory=dict)
    _ranges: dict[tuple[int, tuple[int, ...]], Ranges] = field(default_factory=dict)

    def rows(self, owner: int, rank: int) -> Numbers:
        """An owner's rows that a rank needs, as runs [n, 2] of which no two touch; of its own rows a rank
        needs all."""
        which, found = _common(self.held[owner], self.seen_by(rank))
        lengths = self.held[owner][:, 1] - self.held[owner][:, 0]
        first = np.cumsum(lengths) - lengths - self.held[owner][:, 0]
        return touching_joined(found + first[which, None])

    def seen_by(self, rank: int) -> Numbers:
        """The positions of all keys that a rank needs, as runs [n, 2] in rising order."""
        if rank not in self._seen:
            self._seen[rank] = self.attended.keys_of(self.held[rank])
        return self._seen[rank]

    def count(self, owner: int, rank: int) -> int:
        """The number of an owner's rows that a rank needs."""
        _, found = _common(self.held[owner], self.seen_by(rank))
        return int((found[:, 1] - found[:, 0]).sum())

    def ranges(self, rank: int, owners: tuple[int, ...]) -> Ranges:
        """The keys that a rank's queries see of the rows that it needs of some owners, which lie in memory
        one after another."""
        if (rank, owners) not in self._ranges:
            keys = [_common(self.held[owner], self.seen_by(rank))[1] for owner in owners]
            met = self.attended.ranges(self.held[rank], touching_joined(np.concatenate(keys)))
            self._ranges[rank, owners] = met
        return self._ranges[rank, owners]


def _common(runs: Numbers, others: Numbers) -> tuple[Numbers, Numbers]:
    """(the index of a run, the positions that it has in common with another run [n, 2]), in the order of
    ``runs``. ``others`` are in rising order and do not overlap."""
    first = np.searchsorted(others[:, 1], runs[:, 0], "right")
    counts = np.maximum(np.searchsorted(others[:, 0], runs[:, 1], "left") - first, 0)
    which = np.repeat(np.arange(len(runs)), counts)
    other = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    starts = np.maximum(runs[which, 0], others[other, 0])
    return which, np.stack((starts, np.minimum(runs[which, 1], others[other, 1])), 1)


def touching_joined(runs: Numbers) -> Numbers:
    """The runs [n, 2] in their order, where a run that begins at the end of the run before is one with it."""
    if not len(runs):
        return runs
    gap = runs[1:, 0] != runs[:-1, 1]
    return np.stack((runs[np.append(True, gap), 0], runs[np.append(gap, True), 1]), 1)


@lru_cache(maxsize=32)
def needed_rows(
    placement: str, size: int, length: int, attended: Attended = CAUSAL, packed: Attended | None = None
) -> NeededRows:
    """The needed rows of ``size`` ranks with ``length`` positions each; arguments as in :class:`Meetings`."""
    return NeededRows(intervals(placement, size, length, attended if packed is None else packed), attended)


def rows_of_meetings(meetings: Meetings) -> NeededRows:
    """The needed rows of the ranks of these meetings."""
    assert meetings.placement is not None
    return needed_rows(
        meetings.placement, meetings.size, meetings.length, meetings.attended, meetings.placed_by
    )


def rows_of_site(site: Site, size: int, placement: str) -> NeededRows:
    """The needed rows of ``size`` ranks at a site of causal attention."""
    return needed_rows(placement, size, site.dims["L"] // size, site.attended or CAUSAL, site.packed)
