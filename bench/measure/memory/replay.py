"""A memory log's events through the caching allocator: what a card gives out and reserves for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spbench.bench.measure.memory.allocator import Block, CachingAllocator, OutOfMemory


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
) -> Replay:
    """Run a memory log's events (see :class:`MemoryLog`) through the allocator.

    Args:
        sizes: bytes of each storage, by its number.
        capacity: usable bytes of the card; None: no limit.
        stops: events, ascending, for :attr:`Replay.reserved`.
        streams: of each storage, by its number; empty: all are of one.
        kind: the allocator, as it is set.
    """
    allocator, streams = kind(capacity), streams or [0] * len(sizes)
    held: dict[int, Block] = {}
    blocks, reserved, served = [0] * len(sizes), list[int](), 0
    failure: OutOfMemory | None = None
    try:
        for end in (*stops, len(events)):
            for number in events[served:end]:
                if number < 0:
                    if (block := held.pop(-number, None)) is not None:
                        allocator.give_back(block)
                elif size := sizes[number - 1]:
                    held[number] = block = allocator.take(size, streams[number - 1])
                    blocks[number - 1] = block.size
                served += 1
            reserved.append(allocator.peak_reserved)
    except OutOfMemory as error:
        failure = error
    peaks = allocator.peak_allocated, allocator.peak_reserved
    return Replay(*peaks, blocks, reserved[: len(stops)], served, failure)
