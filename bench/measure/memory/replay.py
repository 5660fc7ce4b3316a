"""A memory log's events through the caching allocator: what a card gives out and reserves for them.

Where a period of events is there again and again (:mod:`.repeated_events`), it is served until nothing new
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

from spbench.bench.measure.memory.allocator import Block, CachingAllocator, OutOfMemory
from spbench.bench.measure.memory.repeated_events import Stretch

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
