"""How often two simulated times were in the order of the measured ones, by how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

#: pairs of times are counted by the part of the shorter one by which the longer one is more: from each of
#: these up to the next
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, math.inf)


class Compared(NamedTuple):
    """Two ways to split a run: logarithms of the one's time over the other's."""

    source: str
    simulated: float
    measured: float


@dataclass(frozen=True)
class Pairs:
    """Pairs of ways to split a run that were simulated about as far apart, and measured.

    Attributes:
        right: those of which the one whose simulated time is shorter was measured to be the shorter.
        pairs, sources: how many, of how many groups of people.
    """

    right: int
    pairs: int
    sources: int

    @property
    def share(self) -> float | None:
        """The part that is right; None: there are no pairs."""
        return self.right / self.pairs if self.pairs else None


def _class_of(apart: float) -> int:
    return sum(apart >= edge for edge in EDGES[1:])


def pairs_by_distance(compared: Iterable[Compared]) -> list[Pairs]:
    """The pairs by how far their simulated times are apart, one for each two of :data:`EDGES`."""
    found: list[list[Compared]] = [[] for _ in pairwise(EDGES)]
    for each in compared:
        found[_class_of(math.expm1(abs(each.simulated)))].append(each)
    return [
        Pairs(sum(c.simulated * c.measured > 0 for c in some), len(some), len({c.source for c in some}))
        for some in found
    ]


def order_in_words(by_distance: Sequence[Pairs], ratio: float) -> str:
    """What was measured of pairs as far apart as two times of this ratio, as "of 91 measured pairs 10 to 20%
    apart, 87% were in the simulated order"; "" if there are none.

    Args:
        by_distance: of :func:`pairs_by_distance`.
    """
    at = _class_of(max(ratio, 1 / ratio) - 1)
    pairs = by_distance[at] if by_distance else Pairs(0, 0, 0)
    if pairs.share is None:
        return ""
    least, most = EDGES[at : at + 2]
    apart = f"{least:.0%} and more" if math.isinf(most) else f"{100 * least:.0f} to {most:.0%}"
    return f"of {pairs.pairs} measured pairs {apart} apart, {pairs.share:.0%} were in the simulated order"
