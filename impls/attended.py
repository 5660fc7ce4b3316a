"""Which positions of a sequence attend to which: a causal mask within packed documents, and within a window.

Where a rank holds some runs of positions of a sequence (its intervals), what its queries see of the keys of
some runs is a list of rectangles, :class:`Ranges`, of which a causal mask or a window leaves a band. Where
sequences are packed of thousands of documents there are as many, so they are made and counted as arrays.

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

#: a run of positions: the first, and the one after the last
Interval = tuple[int, int]
#: runs of positions, one a row [n, 2]
Intervals = Sequence[Interval] | Numbers

#: a position after all of a sequence, and a distance that no band reaches
_FAR = 1 << 40


class Range(NamedTuple):
    """``queries`` queries from ``first_query`` on and ``keys`` keys from ``first_key`` on, both counted in
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

    def tiles(self, queries: int) -> Iterator[Range]:
        """This range in ranges of at most that many queries, each with the keys that its queries see."""
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
    """What queries see of keys: ranges [n, 6], one a row, in the columns of :class:`Range`."""

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
        """All numbers as one text, for operators to take: whatever sees the arguments of an operator looks at
        each number of a list."""
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
        """The ranges as counted from later beginnings: ``queries`` rows and ``keys`` rows further on."""
        return Ranges(self.numbers - np.array([queries, 0, keys, 0, 0, 0]))

    @property
    def pairs(self) -> Numbers:
        """The number of pairs of a query and a key that meet, by range [n]."""
        _, queries, _, keys, low, high = self.numbers.T
        return _pairs_up_to(queries, keys, high) - _pairs_up_to(queries, keys, low - 1)

    @property
    def widths(self) -> Numbers:
        """How many keys a query sees at most, of each [n]."""
        _, _, _, keys, low, high = self.numbers.T
        return np.minimum(keys, high - low + 1)


def _pairs_up_to(queries: Numbers, keys: Numbers, high: Numbers) -> Numbers:
    """Pairs of query i and key j with j - i <= high."""
    first = np.clip(-high, 0, queries)  # the first query that sees any key
    full = np.minimum(np.maximum(first, keys - high - 1), queries)  # the first that sees all
    some = full - first
    return some * (first + high + 1) + some * (some - 1) // 2 + (queries - full) * keys


def _repeated(counts: Numbers, firsts: Numbers) -> tuple[Numbers, Numbers]:
    """Each place i counts[i] times, and beside it firsts[i], firsts[i] + 1, ..."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + (firsts - np.cumsum(counts) + counts)[which]


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

    @cached_property
    def _borders(self) -> tuple[Numbers, Numbers, Numbers]:
        """The first position of each document and of one behind the last, the one after its last, and how
        many pairs meet before it; where there are none, one document begins and does not end."""
        lengths = np.array(self.documents, np.int64)
        ends = np.cumsum(lengths)
        pairs = np.cumsum(self._pairs_of_first(lengths))
        return np.append(0, ends), np.append(ends, _FAR), np.append(0, pairs)

    def _pairs_of_first(self, queries: Numbers) -> Numbers:
        """Pairs of so many queries from a document's first on."""
        seen = queries if self.window is None else np.minimum(queries, self.window)
        return seen * (seen + 1) // 2 + (queries - seen) * seen

    def within_documents(self, intervals: Intervals) -> Numbers:
        """The parts of intervals in documents [n, 4], in order: document, its first position, and the part's
        first and the one after its last."""
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
        """Queries in each interval and keys anywhere that meet [n]."""
        runs = np.asarray(intervals, np.int64).reshape(-1, 2)
        begins, ends, before = self._borders
        # a run that ends where a document does has all of it
        document = np.searchsorted(ends, runs, "right")
        up_to = before[document] + self._pairs_of_first(runs - begins[document])
        return up_to[:, 1] - up_to[:, 0]

    def ranges(self, queries: Intervals, keys: Intervals) -> Ranges:
        """What queries in intervals see of keys in intervals, both in memory in the order of these."""
        of_queries, of_keys = self.within_documents(queries), self.within_documents(keys)
        by_document = np.argsort(of_keys[:, 0], kind="stable")
        documents = of_keys[by_document, 0]
        first = np.searchsorted(documents, of_queries[:, 0], "left")
        mine, place = _repeated(np.searchsorted(documents, of_queries[:, 0], "right") - first, first)
        return self._seen(of_queries, of_keys, mine, by_document[place])

    def _seen(self, queries: Numbers, keys: Numbers, mine: Numbers, theirs: Numbers) -> Ranges:
        """What of parts of queries see of parts of keys, of the same document each, by their numbers."""
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
    """The places in memory of parts that lie one after another."""
    lengths = parts[:, 3] - parts[:, 2]
    return np.cumsum(lengths) - lengths


#: a causal mask and nothing else
CAUSAL = Attended()
