"""Which positions of a sequence attend to which: a causal mask within packed documents, and within a window.

If a rank holds some runs of positions of a sequence (its intervals), the keys of other runs that its queries
see form a list of rectangles, :class:`Ranges`, of which a causal mask or a window leaves a band. A sequence
packed of thousands of documents has as many rectangles, so these are computed as arrays.

Shape letters: L sequence, M queries, N keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

#: a run of positions: (its first position, the position after its last)
Interval = tuple[int, int]
#: runs of positions, one a row [n, 2]
Intervals = Sequence[Interval] | Numbers

#: a position after every sequence, and a distance that no band reaches
_FAR = 1 << 40


class Range(NamedTuple):
    """``queries`` queries from ``first_query`` on and ``keys`` keys from ``first_key`` on, as indices into
    the memory of the ranks that hold them: query i of the range sees key j of the range if low <= j - i <=
    high. Each query sees a key."""

    first_query: int
    queries: int
    first_key: int
    keys: int
    low: int
    high: int

    @property
    def whole(self) -> bool:
        """Whether each query of the range sees each key."""
        return self.low <= 1 - self.queries and self.high >= self.keys - 1

    @property
    def causal(self) -> bool:
        """Whether the range is a square in which query i sees the keys 0 to i."""
        return self.queries == self.keys and self.high == 0 and self.low <= 1 - self.queries

    def tiles(self, queries: int) -> Iterator[Range]:
        """Yields this range cut into ranges of at most ``queries`` queries, each with their keys."""
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


class Ranges:
    """The keys that queries see: an array [n, 6] with a :class:`Range` in each row."""

    def __init__(self, numbers: Numbers):
        self.numbers = numbers

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> Ranges:
        """The ranges as one array of numbers."""
        return cls(np.array([*ranges], np.int64).reshape(-1, len(Range._fields)))

    @classmethod
    def from_text(cls, text: str) -> Ranges:
        """The ranges that have this :attr:`text`."""
        return cls(np.frombuffer(text.encode("latin-1"), np.int64).reshape(-1, len(Range._fields)))

    @cached_property
    def text(self) -> str:
        """All numbers as one text, the argument of operators, because observers of operators look at each
        number of a list."""
        return self.numbers.tobytes().decode("latin-1")

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Range]:
        return (Range(*row) for row in self.numbers.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def queries(self) -> Interval:
        """The interval from the first query to the last; some between may see no key."""
        return self._extent(0)

    @property
    def keys(self) -> Interval:
        """The interval from the first key to the last."""
        return self._extent(2)

    def _extent(self, column: int) -> Interval:
        first, count = self.numbers[:, column], self.numbers[:, column + 1]
        return int(first.min()), int((first + count).max())

    def moved(self, queries: int, keys: int) -> Ranges:
        """The ranges with indices that count from query ``queries`` and from key ``keys`` on."""
        return Ranges(self.numbers - np.array([queries, 0, keys, 0, 0, 0]))

    @property
    def pairs(self) -> Numbers:
        """The number of pairs of a query and a key that meet, by range [n]."""
        _, queries, _, keys, low, high = self.numbers.T
        return _pairs_up_to(queries, keys, high) - _pairs_up_to(queries, keys, low - 1)

    @property
    def widths(self) -> Numbers:
        """The largest number of keys that a query sees, by range [n]."""
        _, _, _, keys, low, high = self.numbers.T
        return np.minimum(keys, high - low + 1)


def _pairs_up_to(queries: Numbers, keys: Numbers, high: Numbers) -> Numbers:
    """The number of pairs of query i and key j with j - i <= high, by range [n]."""
    first = np.clip(-high, 0, queries)  # the first query that sees any key
    full = np.minimum(np.maximum(first, keys - high - 1), queries)  # the first query that sees all keys
    some = full - first
    return some * (first + high + 1) + some * (some - 1) // 2 + (queries - full) * keys


def _repeated(counts: Numbers, firsts: Numbers) -> tuple[Numbers, Numbers]:
    """(each index i, counts[i] times; next to each of these firsts[i], firsts[i] + 1, ...)."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + (firsts - np.cumsum(counts) + counts)[which]


@dataclass(frozen=True)
class Attended:
    """The positions to which a position of a sequence attends: itself and the earlier positions of its
    document; if there is a window, only the last of these.

    Attributes:
        documents: the lengths of the sequence's packed documents, which add up to its length; empty: the
            sequence is one document.
        window: the largest number W of positions to which a position attends, itself included: query i sees
            keys j with i - W < j <= i, as ``sliding_window`` of transformers; None: no window.
    """

    documents: tuple[int, ...] = ()
    window: int | None = None

    @property
    def plain(self) -> bool:
        """Whether there is only the causal mask of one document."""
        return not self.documents and self.window is None

    def in_layer(self, window: int | None, length: int) -> Attended:
        """The same documents with the window of a layer, for a sequence of ``length`` positions; a window
        that hides no position counts as none."""
        return replace(self, window=None if window is None or window >= length else window)

    @property
    def dims(self) -> dict[str, int]:
        """The entries of :attr:`Site.dims` for these documents and this window."""
        documents = {"documents": len(self.documents)} if self.documents else {}
        return documents | ({} if self.window is None else {"window": self.window})

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The position after the last of each document: cu_seqlens of FlashAttention, without its 0."""
        return tuple(accumulate(self.documents))

    def document_of(self, position: int) -> int:
        """The index of the document of a position."""
        return bisect_right(self.ends, position)

    @cached_property
    def _borders(self) -> tuple[Numbers, Numbers, Numbers]:
        """For each document, and an endless one behind the last: (its first position, the position after its
        last, number of pairs of a query and a key before it). Without documents only the endless one."""
        lengths = np.array(self.documents, np.int64)
        ends = np.cumsum(lengths)
        pairs = np.cumsum(self._pairs_of_first(lengths))
        return np.append(0, ends), np.append(ends, _FAR), np.append(0, pairs)

    def _pairs_of_first(self, queries: Numbers) -> Numbers:
        """The number of pairs of a key and one of the first ``queries`` queries of a document."""
        seen = queries if self.window is None else np.minimum(queries, self.window)
        return seen * (seen + 1) // 2 + (queries - seen) * seen

    def within_documents(self, intervals: Intervals) -> Numbers:
        """The parts of intervals by document [n, 4]: the document's index, its first position, the part's
        first position and the position after the part's last."""
        runs = np.asarray(intervals, np.int64).reshape(-1, 2)
        starts, stops = runs[runs[:, 0] < runs[:, 1]].T
        begins, ends, _ = self._borders
        first, last = np.searchsorted(ends, starts, "right"), np.searchsorted(ends, stops, "left")
        run, document = _repeated(last - first + 1, first)
        begin = begins[document]
        return np.stack(
            (document, begin, np.maximum(starts[run], begin), np.minimum(stops[run], ends[document])), 1
        )

    def pairs(self, intervals: Intervals) -> Numbers:
        """The number of pairs of a query in an interval and any key that meet, by interval [n]."""
        runs = np.asarray(intervals, np.int64).reshape(-1, 2)
        begins, ends, before = self._borders
        # a run that ends with a document counts all pairs of the document
        document = np.searchsorted(ends, runs, "right")
        up_to = before[document] + self._pairs_of_first(runs - begins[document])
        return up_to[:, 1] - up_to[:, 0]

    def keys_of(self, queries: Intervals) -> Numbers:
        """The positions of the keys that queries in intervals see, as runs [n, 2] in rising order, of which
        no two touch."""
        _, begins, starts, stops = self.within_documents(queries).T
        firsts = begins if self.window is None else np.maximum(begins, starts - self.window + 1)
        order = np.argsort(firsts, kind="stable")
        firsts, reached = firsts[order], np.maximum.accumulate(stops[order])
        gap = firsts[1:] > reached[:-1]
        return np.stack((firsts[np.append(True, gap)], reached[np.append(gap, True)]), 1)

    def ranges(self, queries: Intervals, keys: Intervals) -> Ranges:
        """The keys in intervals that queries in intervals see; both lie in memory in the intervals' order."""
        of_queries, of_keys = self.within_documents(queries), self.within_documents(keys)
        by_document = np.argsort(of_keys[:, 0], kind="stable")
        documents = of_keys[by_document, 0]
        first = np.searchsorted(documents, of_queries[:, 0], "left")
        mine, place = _repeated(np.searchsorted(documents, of_queries[:, 0], "right") - first, first)
        return self._seen(of_queries, of_keys, mine, by_document[place])

    def _seen(self, queries: Numbers, keys: Numbers, mine: Numbers, theirs: Numbers) -> Ranges:
        """The keys that parts of queries see of parts of keys. ``mine`` and ``theirs`` are indices of parts
        in :meth:`within_documents`, in pairs of the same document."""
        (start, end), (first, last) = queries[mine, 2:].T, keys[theirs, 2:].T
        begin, stop, behind = np.maximum(start, first), end, first
        if self.window is not None:
            stop = np.minimum(stop, last - 1 + self.window)
            behind = np.maximum(first, begin - self.window + 1)
        last = np.minimum(last, stop)
        m, n, shift = stop - begin, last - behind, begin - behind
        low = 1 - m if self.window is None else np.maximum(1 - m, shift - self.window + 1)
        query = _places(queries)[mine] + begin - start
        key = _places(keys)[theirs] + behind - first
        columns = np.stack((query, m, key, n, low, np.minimum(shift, n - 1)), 1)
        return Ranges(columns[(m > 0) & (n > 0)])


def _places(parts: Numbers) -> Numbers:
    """The start in memory of each part [n], where parts lie one after another."""
    lengths = parts[:, 3] - parts[:, 2]
    return np.cumsum(lengths) - lengths


#: a causal mask and nothing else
CAUSAL = Attended()
