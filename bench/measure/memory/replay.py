"""A memory log's events through the caching allocator: what a card gives out and reserves for them.

Where a period of events is there again and again (:func:`stretches`), it is served until nothing new
can come of it, and the other periods are left out. That is so where two cycles of some periods after each
other have given out the same blocks and taken back the same, and in the second one every request was served
by a free block. What is in use after a cycle follows from what was in use before it and from the last thing
that the cycle did with each block. So after the second one it is what it was after the first; and where no
segment has come or gone, what is free follows from it, as free neighbours are always merged. So the
allocator is in the same state, and a third cycle finds what the second one found. What it takes back was made
in it or in the second: a storage of the first one that lived longer would have kept its block from the
storage in its place in the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spbench.bench.measure.memory.allocator import Block, CachingAllocator, OutOfMemory

#: events between two at which is looked for a period
_LOOK = 512
#: events of the longest period, and the fewest periods of a stretch
_LONGEST, _FEWEST = 2**13, 8
#: events that are looked for as one, a power of two; of the places where they are, the nearest so many count
_WORD, _PLACES = 8, 8
#: events that are compared at first, where two lists may soon part
_FIRST_LOOK = 256


class Stretch(NamedTuple):
    """Events of a log from ``first`` up to ``end``, of which each is like that ``period`` events before.

    Attributes:
        births: in a period.
    """

    first: int
    end: int
    period: int
    births: int


def in_common(a: np.ndarray, b: np.ndarray) -> int:
    """How many entries two lists have in common, from the first on."""
    most, at, look = min(len(a), len(b)), 0, _FIRST_LOOK
    while at < most:
        end = min(most, at + look)
        differ = a[at:end] != b[at:end]
        if differ.any():
            return at + int(differ.argmax())
        at, look = end, 2 * look
    return most


def stretches(sizes: Sequence[int], events: Sequence[int], streams: Sequence[int] = ()) -> list[Stretch]:
    """The stretches of a log, see :class:`MemoryLog`, in order; not all that there are: those that a quick
    look shows.

    Two events are alike if both are births of as many bytes on one stream, or both are deaths of a storage
    that was born as many births ago. So where each event of a stretch is like that one period before, the
    numbers of storages are those of a period before, larger by its births.
    """
    numbers = np.asarray(events, dtype=np.int64)
    born = numbers > 0
    births = numbers[born]
    nbytes, streams_used = np.asarray(sizes, dtype=np.int64), max(streams, default=0) + 1
    in_order = len(births) <= len(nbytes) and (births == np.arange(1, len(births) + 1)).all()
    if not in_order or nbytes.max(initial=0) >= 2**62 // streams_used:
        return []
    newest = np.maximum.accumulate(np.where(born, numbers, 0))
    like = -1 - newest - numbers  # of a death: below 0, by how many were born after its storage
    asked = nbytes * streams_used + (np.asarray(streams, dtype=np.int64) if streams else 0)
    like[born] = asked[births - 1]
    words, at = _words(like), 0
    longest: list[Stretch] = []
    while at < len(words):
        stretch = _longest(like, words, longest[-1].end if longest else 0, at)
        if stretch is not None:
            longest.append(stretch)
        at = at + _LOOK if stretch is None else stretch.end
    return longest


def _words(like: np.ndarray) -> np.ndarray:
    """A number for each event but the last ones, the same where it and those after it are alike."""
    words, length = like.astype(np.uint64), 1
    while length < _WORD and length < len(words):
        words = words[:-length] * np.uint64(0x9E3779B97F4A7C15) + words[length:]
        words ^= words >> np.uint64(29)
        length *= 2
    return words


def _longest(like: np.ndarray, words: np.ndarray, free: int, at: int) -> Stretch | None:
    """The stretch with event ``at`` that ends last, and begins at ``free`` or later; None: there is none."""
    places = np.flatnonzero(words[at + 1 : at + 1 + _LONGEST] == words[at])[:_PLACES] + 1
    ends = [(at + period + in_common(like[at:], like[at + period :]), -period) for period in places.tolist()]
    if not ends:
        return None
    end, negative = max(ends)  # the shortest of those that end last
    period = -negative
    begin = max(free, at - _LOOK)
    differ = np.flatnonzero(like[begin:at] != like[begin + period : at + period])
    first = begin + int(differ[-1]) + 1 if len(differ) else begin
    births = int((like[end - period : end] >= 0).sum())
    return Stretch(first, end, period, births) if births and end - first >= _FEWEST * period else None


#: the most periods of a cycle, and after how many periods no cycle is looked for
_CYCLES, _PATIENCE = 24, 64


@dataclass(frozen=True)
class Replay:
    """What became of a log on a card, over the whole log or until it ran out of memory.

    Attributes:
        peak_allocated, peak_reserved: bytes.
        blocks: bytes of the block that each storage was given, by its number; 0 for one of no bytes, or that
            was not reached.
        reserved: for each of the ``stops`` that were asked for, the most bytes that were reserved before it.
        events: how many were served; all, if it fits.
        out_of_memory: the request that failed, and the state then; None if it fits.
    """

    peak_allocated: int
    peak_reserved: int
    blocks: list[int]
    reserved: list[int]
    events: int
    out_of_memory: OutOfMemory | None = None


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    capacity: int | None,
    stops: Sequence[int] = (),
    streams: Sequence[int] = (),
    kind: type[CachingAllocator] = CachingAllocator,
    stretches: Sequence[Stretch] = (),
) -> Replay:
    """Run a memory log's events (see :class:`MemoryLog`) through the allocator.

    Args:
        sizes: bytes of each storage, by its number.
        capacity: usable bytes of the card; None: no limit.
        stops: events, ascending, for :attr:`Replay.reserved`.
        streams: of each storage, by its number; empty: all are of one.
        kind: the allocator, as it is set.
        stretches: of the log, where periods may be left out; empty: each event is served.
    """
    replaying = _Replaying(sizes, events, streams or [0] * len(sizes), kind(capacity), stops)
    failure = None
    try:
        for stretch in stretches:
            replaying.serve(stretch.first)
            replaying.serve_periods(stretch)
        replaying.serve(len(events))
    except OutOfMemory as error:
        failure = error
    allocator, at = replaying.allocator, replaying.at
    peaks = allocator.peak_allocated, allocator.peak_reserved
    return Replay(*peaks, replaying.blocks, replaying.reserved, at, failure)


class _Replaying:
    """A replay, up to event ``at``."""

    def __init__(
        self,
        sizes: Sequence[int],
        events: Sequence[int],
        streams: Sequence[int],
        allocator: CachingAllocator,
        stops: Sequence[int],
    ):
        self._sizes, self._events, self._streams = sizes, events, streams
        self.allocator, self.blocks, self.at = allocator, [0] * len(sizes), 0
        self.reserved: list[int] = []
        self._stops: Iterator[int] = iter([*stops, len(events) + 1])
        self._stop = next(self._stops)
        self._held: dict[int, Block] = {}
        self._pass_stops()

    def _pass_stops(self) -> None:
        while self._stop <= self.at:
            self.reserved.append(self.allocator.peak_reserved)
            self._stop = next(self._stops)

    def serve(self, end: int) -> list[int]:
        """Serve events up to ``end``; returns the address of the block of each, -1 where there is none.

        Raises:
            OutOfMemory: at event :attr:`at`.
        """
        addresses: list[int] = []
        while self.at < end:
            addresses += self._serve(min(end, self._stop))
            self._pass_stops()
        return addresses

    def _serve(self, end: int) -> list[int]:
        allocator, held, blocks = self.allocator, self._held, self.blocks
        sizes, streams, first = self._sizes, self._streams, self.at
        addresses = [-1] * (end - first)
        try:
            for place, number in enumerate(self._events[first:end]):
                if number < 0:
                    block = held.pop(-number, None)
                    if block is None:
                        continue
                    allocator.give_back(block)
                elif size := sizes[number - 1]:
                    held[number] = block = allocator.take(size, streams[number - 1])
                    blocks[number - 1] = block.size
                else:
                    continue
                addresses[place] = block.address
        except OutOfMemory:
            self.at = first + place
            raise
        self.at = end
        return addresses

    def serve_periods(self, stretch: Stretch) -> None:
        """Serve a stretch as far as it must be, and leave the rest of its whole cycles out. Events from
        :attr:`at` on are served next.

        Raises:
            OutOfMemory: at event :attr:`at`.
        """
        addresses: list[int] = []
        calm = 0  # periods since a segment was made
        for served in range(1, min(_PATIENCE, (stretch.end - self.at) // stretch.period) + 1):
            segments = self.allocator.new_segments
            addresses += self.serve(self.at + stretch.period)
            calm = calm + 1 if self.allocator.new_segments == segments else 0
            newest = max(self._events[self.at - stretch.period : self.at])
            for cycle in range(1, min(_CYCLES, calm, served // 2) + 1):
                if self._repeats(addresses, cycle * stretch.period, newest, cycle * stretch.births):
                    self._leave_out(stretch, cycle, newest)
                    return

    def _repeats(self, addresses: list[int], events: int, newest: int, births: int) -> bool:
        """Whether the last two cycles, of that many events and births, had the same blocks."""
        if addresses[-events:] != addresses[-2 * events : -events]:
            return False
        last, before = (self.blocks[end - births : end] for end in (newest, newest - births))
        return last == before

    def _leave_out(self, stretch: Stretch, cycle: int, newest: int) -> None:
        """Go to the end of the last whole cycle of a stretch, as if the last one were there until then."""
        events, births = cycle * stretch.period, cycle * stretch.births
        times = (stretch.end - self.at) // events
        self.blocks[newest : newest + times * births] = self.blocks[newest - births : newest] * times
        for number in range(newest - births + 1, newest + 1):
            if number in self._held:
                self._held[number + times * births] = self._held.pop(number)
        self.at += times * events
        self._pass_stops()
