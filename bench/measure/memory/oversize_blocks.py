"""The caching allocator with ``PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:N``.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: should_split, get_free_block,
release_available_cached_blocks. They differ from those of :mod:`.allocator` in this, where a block or a
request of N MiB or more is oversize:

- An oversize request gets a block whole, and one of at least 20 MiB more than it asks for does not serve it.
- Other requests are not served from oversize blocks, so these stay whole.
- Where the card has no room for a segment, an oversize free block of the pool is returned to it first, the
  smallest that is as large as the request, or else several, the largest first, until they are; all wholly
  free segments only after that.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

from spbench.bench.measure.memory.allocator import LARGE_SEGMENT, MIB, Block, CachingAllocator


class OversizeBlocks(CachingAllocator):
    """As :class:`CachingAllocator`, with blocks that are not split; see :func:`unsplit_from`."""

    def _take(self, size: int, of: tuple[int, bool]) -> Block | None:
        pool = self._free[of]
        index = bisect_left(pool, (size, -1))
        if index < len(pool) and not of[1]:
            best = pool[index][0]
            oversize = size >= self.split_limit
            if best >= (size + LARGE_SEGMENT if oversize else self.split_limit):
                return None
        return super()._take(size, of)

    def _make_room(self, size: int, segment: int, of: tuple[int, bool]) -> None:
        self._release_oversize(size, of)
        if not self._has_room(segment):
            super()._make_room(size, segment, of)

    def _release_oversize(self, size: int, of: tuple[int, bool]) -> None:
        # none below the limit is as large as the request, or it would have served it
        pool = self._free[of]
        index = bisect_left(pool, (size, -1))
        if index < len(pool):
            self._release(pool.pop(index))
            return
        released = 0
        while pool and pool[-1][0] >= self.split_limit and released < size:
            entry = pool.pop()
            released += entry[0]
            self._release(entry)


@cache
def unsplit_from(mib: int) -> type[OversizeBlocks]:
    """The allocator with that ``max_split_size_mb``."""
    return type("OversizeBlocks", (OversizeBlocks,), {"split_limit": mib * MIB})
