"""A model of PyTorch's CUDA caching allocator: the bytes that a card reserves for requests, and for the
events of a memory log (:func:`replay`).

The rules are those of c10/cuda/CUDACachingAllocator.cpp with default settings (:mod:`.allocator_settings` has
others), unchanged from PyTorch 1.7 to 2.x: sizes rounded to 512 B; a pool of blocks up to 1 MiB in segments
of 2 MiB, a pool of larger ones in segments of 20 MiB (requests below 10 MiB) or of the request rounded to 2
MiB; best fit; a block is split if what remains is at least 512 B (small) or more than 1 MiB (large); free
neighbours merge; if the card has no room for a segment, all wholly free segments are returned to it before an
out-of-memory error. A segment belongs to the stream for which it was made, and serves only requests of that
stream, because kernels of other streams may run later. Not replayed: blocks that record_stream keeps from
being given out again for a while.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

MIB = 2**20
#: blocks are a multiple of this many bytes
GRANULE = 512
SMALL_LIMIT = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_SEGMENT_LIMIT = 10 * MIB
#: seconds of cudaFree and cudaMalloc for a segment (rapidsai/rmm#283 and #284: 100,000 pairs of up to 2 MiB
#: take 7.6 and 6.6 s), and for each of its bytes (kokkos/kokkos#317: cudaMalloc of 400 MB takes 0.43 ms)
SEGMENT_S, BYTE_S = 70e-6, 1.0e-12


def rounded(nbytes: np.ndarray) -> np.ndarray:
    """Bytes as the allocator counts them: rounded up to whole granules of 512 bytes; 0 for 0."""
    return -(-nbytes // GRANULE) * GRANULE


class Block:
    """A range of addresses in a segment, in use or free, with links to its neighbours in the segment."""

    __slots__ = ("address", "free", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: tuple[int, bool]):
        self.address, self.size, self.pool = address, size, pool
        self.free = False
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def whole_segment(self) -> bool:
        return self.previous is None and self.next is None


class OutOfMemory(Exception):
    """The card has no room for ``requested`` bytes; ``retried``: cached segments were returned first."""

    def __init__(self, requested: int, allocated: int, reserved: int, retried: bool = True):
        self.requested, self.allocated, self.reserved = requested, allocated, reserved
        self.retried = retried
        super().__init__(f"{requested} bytes with {allocated} allocated, {reserved} reserved")


class CachingAllocator:
    """The allocator and its state.

    Args:
        capacity: usable bytes of the card; None: no limit.

    Attributes:
        allocated, reserved: bytes now, as torch.cuda.memory_allocated and memory_reserved count them.
        peak_reserved: the most reserved bytes so far.
    """

    #: large segments are a multiple of this many bytes
    segment_granule: ClassVar[int] = 2 * MIB
    #: the fewest remaining bytes of a large block that are split off as a free block
    least_rest: ClassVar[int] = SMALL_LIMIT + GRANULE
    #: whether the allocator returns cached segments to a full card and tries the request again
    retries: ClassVar[bool] = True
    #: requests of at least this many bytes get a large block whole
    split_limit: ClassVar[float] = math.inf

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_reserved = 0
        #: bytes returned to the card because it was full, and the driver's seconds to return and replace them
        self.returned, self.returned_s = 0, 0.0
        # by (stream, whether small): the free blocks as (size, address), in the allocator's order
        self._free: defaultdict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
        self._blocks: dict[int, Block] = {}
        self._next_address = 0

    def take(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate ``nbytes`` for kernels of a stream; returns the block, which stays one object until freed.

        Raises:
            OutOfMemory: the card has no room even after the cached segments are returned.
        """
        size = -(-nbytes // GRANULE) * GRANULE or GRANULE
        pool = stream, size <= SMALL_LIMIT
        block = self._take(size, pool) or self._new_segment(size, pool)
        remaining = block.size - size
        if remaining >= (GRANULE if pool[1] else self.least_rest) and size < self.split_limit:
            self._add_free(self._cut(block, size))
        self.allocated += block.size
        return block

    def give_back(self, block: Block) -> None:
        """Free a block that :meth:`take` returned."""
        self.allocated -= block.size
        self._join(block)

    def segments(self) -> Iterator[list[tuple[int, int, bool]]]:
        """For each reserved segment, its blocks in order: (address, bytes, whether the block is free)."""
        for first in self._blocks.values():
            if self._is_hole(first) or not (first.previous is None or self._is_hole(first.previous)):
                continue
            blocks, block = [], first
            while block is not None and not self._is_hole(block):
                blocks.append((block.address, block.size, block.free))
                block = block.next  # type: ignore[assignment]
            yield blocks

    def _is_hole(self, block: Block) -> bool:
        """Whether a block is a range of addresses without memory, which ends a segment."""
        return False

    def pool_of(self, address: int) -> tuple[int, bool]:
        """(stream, whether it is the pool of small blocks) for the pool of the block at an address."""
        return self._blocks[address].pool

    def _take(self, size: int, of: tuple[int, bool]) -> Block | None:
        pool = self._free[of]
        index = bisect_left(pool, (size, -1))
        if index == len(pool):
            return None
        _, address = pool.pop(index)
        block = self._blocks[address]
        block.free = False
        return block

    def _new_segment(self, size: int, pool: tuple[int, bool]) -> Block:
        if pool[1]:
            segment = SMALL_SEGMENT
        elif size < LARGE_SEGMENT_LIMIT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // self.segment_granule) * self.segment_granule
        if not self._has_room(segment):
            if self.retries:
                self._make_room(size, segment, pool)
            if not self._has_room(segment):
                raise OutOfMemory(size, self.allocated, self.reserved, self.retries)
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        self._blocks[block.address] = block
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _has_room(self, segment: int) -> bool:
        return self.capacity is None or self.reserved + segment <= self.capacity

    def _make_room(self, size: int, segment: int, of: tuple[int, bool]) -> None:
        """Return free segments to the card, to make room for a new ``segment`` (bytes) for a request of
        ``size`` bytes."""
        self._release_cached()

    def _release_cached(self) -> None:
        for pool in self._free.values():
            for entry in [e for e in pool if self._blocks[e[1]].whole_segment]:
                pool.remove(entry)
                self._release(entry)

    def _release(self, entry: tuple[int, int]) -> None:
        """Return a free segment to the card, after the caller has removed its entry from the pool."""
        nbytes, address = entry
        self.reserved -= nbytes
        self.returned += nbytes
        self.returned_s += SEGMENT_S + nbytes * BYTE_S
        del self._blocks[address]

    def _join(self, block: Block) -> Block:
        """Make a block free and merge it with its free neighbours; returns the merged block."""
        # most calls of a replay end here, so the pool is looked up once
        pool, before, after = self._free[block.pool], block.previous, block.next
        if before is not None and before.free:
            del pool[bisect_left(pool, (before.size, before.address))]
            block = self._merge(before, block)
        if after is not None and after.free:
            del pool[bisect_left(pool, (after.size, after.address))]
            block = self._merge(block, after)
        block.free = True
        insort(pool, (block.size, block.address))
        return block

    def _cut(self, block: Block, size: int) -> Block:
        """Cut a block after ``size`` bytes; returns the block of the remaining bytes, which is in no pool."""
        rest = Block(block.address + size, block.size - size, block.pool)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._blocks[rest.address] = rest
        return rest

    def _merge(self, left: Block, right: Block) -> Block:
        left.size += right.size
        left.next = right.next
        if right.next is not None:
            right.next.previous = left
        del self._blocks[right.address]
        return left

    def _add_free(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address))

    def _remove_free(self, block: Block) -> None:
        block.free = False
        pool = self._free[block.pool]
        del pool[bisect_left(pool, (block.size, block.address))]


def without_retries(kind: type[CachingAllocator]) -> type[CachingAllocator]:
    """A subclass of ``kind`` that is out of memory where ``kind`` returns cached segments and tries again."""
    return type(kind.__name__, (kind,), {"retries": False})


@dataclass(frozen=True)
class Replay:
    """The result of a memory log's replay on a card, over the whole log or until it ran out of memory.

    Attributes:
        peak_reserved: the most bytes reserved.
        blocks: by storage, the bytes of its block; 0 for a storage of 0 bytes, or after the failure.
        reserved: for each of the replay's ``stops``, the most bytes reserved before that event.
        returned: for each stop, (bytes returned to the full card so far, the driver's seconds for them).
        events: the number of events that were served; all events, if the log fits.
        out_of_memory: the request that failed, with the allocator's bytes then; None if the log fits.
    """

    peak_reserved: int
    blocks: list[int]
    reserved: list[int]
    returned: list[tuple[int, float]]
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
        streams: each storage's stream, by its number; empty: all storages are of one stream.
        kind: the class of the allocator.
    """
    allocator, streams = kind(capacity), streams or [0] * len(sizes)
    held: dict[int, Block] = {}
    blocks, reserved, returned, served = [0] * len(sizes), list[int](), list[tuple[int, float]](), 0
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
            returned.append((allocator.returned, allocator.returned_s))
    except OutOfMemory as error:
        failure = error
    at_stops = reserved[: len(stops)], returned[: len(stops)]
    return Replay(allocator.peak_reserved, blocks, *at_stops, served, failure)
