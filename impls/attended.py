"""Which positions of a sequence attend to which: a causal mask within packed documents, and within a window.

Where a rank holds some runs of positions of a sequence (its intervals), what its queries see of the keys of
some runs is a list of rectangles, a :class:`Range` each, of which a causal mask or a window leaves a band.

Shape letters: L sequence, M queries, N keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

#: a run of positions: the first, and the one after the last
Interval = tuple[int, int]


class Range(NamedTuple):
    """Of ``queries`` queries from ``first_query`` on and ``keys`` keys from ``first_key`` on, both counted in
    the memory of the ranks that hold them: query i of these sees key j of these where low <= j - i <= high.
    Each of the queries sees a key."""

    first_query: int
    queries: int
    first_key: int
    keys: int
    low: int
    high: int

    @property
    def whole(self) -> bool:
        """Whether each of the queries sees each of the keys."""
        return self.low <= 1 - self.queries and self.high >= self.keys - 1

    @property
    def causal(self) -> bool:
        """Whether it is a square of which query i sees the keys up to i."""
        return self.queries == self.keys and self.high == 0 and self.low <= 1 - self.queries

    @property
    def pairs(self) -> int:
        """Queries and keys that meet."""
        return self._up_to(self.high) - self._up_to(self.low - 1)

    def _up_to(self, high: int) -> int:
        """Pairs with j - i <= high."""
        first = min(max(0, -high), self.queries)  # the first query that sees any key
        full = min(max(first, self.keys - high - 1), self.queries)  # the first that sees all
        some = full - first
        return some * (first + high + 1) + some * (some - 1) // 2 + (self.queries - full) * self.keys

    def moved(self, queries: int, keys: int) -> Range:
        """The same, where memory begins that much later."""
        return self._replace(first_query=self.first_query - queries, first_key=self.first_key - keys)

    def tiles(self, queries: int) -> Iterator[Range]:
        """The same in ranges of at most that many queries, with the keys that they see."""
        for start in range(0, self.queries, queries):
            count = min(queries, self.queries - start)
            first = max(0, start + self.low)
            end = min(self.keys, start + count + self.high)
            shift = start - first
            yield Range(
                self.first_query + start,
                count,
                self.first_key + first,
                end - first,
                self.low + shift,
                self.high + shift,
            )


@dataclass(frozen=True)
class Attended:
    """Which positions of a sequence a position attends to: itself and the earlier ones of its document, and
    of these, if there is a window, the last.

    Attributes:
        documents: the lengths of the documents that the sequence is packed of, which add up to its length;
            none: it is one document.
        window: how many positions, with its own, a position attends to at most, W: query i sees keys j with
            i - W < j <= i, as ``sliding_window`` of transformers; None: no window.
    """

    documents: tuple[int, ...] = ()
    window: int | None = None

    @property
    def plain(self) -> bool:
        """Whether there is nothing but the causal mask of one document."""
        return not self.documents and self.window is None

    def in_layer(self, window: int | None, length: int) -> Attended:
        """What positions attend to in a layer with that window, or without one, of a sequence of ``length``
        positions; a window that hides none of them is none."""
        return replace(self, window=None if window is None or window >= length else window)

    @property
    def dims(self) -> dict[str, int]:
        """The dims of a site of attention that say so."""
        documents = {"documents": len(self.documents)} if self.documents else {}
        return documents | ({} if self.window is None else {"window": self.window})

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The position after the last of each document: cu_seqlens of FlashAttention, without its 0."""
        return tuple(accumulate(self.documents))

    def document_of(self, position: int) -> int:
        """Which document a position is of."""
        return bisect_right(self.ends, position)

    def within_documents(self, intervals: Iterable[Interval]) -> Iterator[tuple[int, int, Interval]]:
        """The parts of intervals in documents: (document, its first position, part), in order."""
        ends = self.ends
        for start, stop in intervals:
            if not ends:
                yield 0, 0, (start, stop)
                continue
            document = bisect_right(ends, start)
            while start < stop:
                end = min(stop, ends[document])
                yield document, ends[document] - self.documents[document], (start, end)
                start, document = end, document + 1

    def pairs(self, intervals: Iterable[Interval]) -> int:
        """Queries in these intervals and keys anywhere that meet."""
        total = 0
        for _, first, (start, end) in self.within_documents(intervals):
            seen = Range(0, end - start, 0, end - first, *self._band(start - first, end - first))
            total += seen.pairs
        return total

    def _band(self, shift: int, keys: int) -> tuple[int, int]:
        """low and high of a range whose first query lies ``shift`` positions after its first key."""
        return (-(1 << 40) if self.window is None else shift - self.window + 1), min(shift, keys - 1)

    def ranges(self, queries: Sequence[Interval], keys: Sequence[Interval]) -> tuple[Range, ...]:
        """What queries in intervals see of keys in intervals, both in memory in the order of these."""
        by_document: dict[int, list[tuple[int, Interval]]] = {}
        place = 0
        for document, _, (start, end) in self.within_documents(keys):
            by_document.setdefault(document, []).append((place, (start, end)))
            place += end - start
        found, place = [], 0
        for document, _, run in self.within_documents(queries):
            for key_place, key_run in by_document.get(document, ()):
                if (seen := self._range(place, run, key_place, key_run)) is not None:
                    found.append(seen)
            place += run[1] - run[0]
        return tuple(found)

    def _range(self, query_place: int, queries: Interval, key_place: int, keys: Interval) -> Range | None:
        """What a run of queries sees of a run of keys of its document."""
        (start, end), (first, last) = queries, keys
        begin, stop = max(start, first), end
        if self.window is not None:
            stop = min(stop, last - 1 + self.window)
            first = max(first, begin - self.window + 1)
        last = min(last, stop)
        if begin >= stop or first >= last:
            return None
        m, n, shift = stop - begin, last - first, begin - first
        low = 1 - m if self.window is None else max(1 - m, shift - self.window + 1)
        places = query_place + begin - start, key_place + first - keys[0]
        return Range(places[0], m, places[1], n, low, min(shift, n - 1))


#: a causal mask and nothing else
CAUSAL = Attended()
