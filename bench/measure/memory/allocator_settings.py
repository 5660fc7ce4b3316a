"""The caching allocator with settings of ``PYTORCH_CUDA_ALLOC_CONF``.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: Note [Expandable Segments], find_expandable_block,
map_block, unmap_block, get_free_block, should_split, release_available_cached_blocks. Each class names the
rules that differ from those of :mod:`.allocator`.
"""

from bisect import bisect_left, insort
from functools import cache

from spbench.bench.measure.memory import allocator

#: bytes of addresses of a segment: more than any card has, and a multiple of each page size
_ADDRESSES = allocator.LARGE_SEGMENT * 2**40
#: seconds of cuMemUnmap, cuMemCreate, cuMemMap and cuMemSetAccess for a page: those of 2 MiB on an A100
#: (nccl/gpu/shm/bench_vmm of magnate3/linux-riscv-dev@f3389cc), counted for those of 20 MiB too
PAGE_S = 256e-6


class OversizeBlocks(allocator.CachingAllocator):
    """``max_split_size_mb:N``, see :func:`unsplit_from`. Blocks and requests of N MiB or more are oversize.

    - An oversize request gets a whole block, which must be less than 20 MiB larger than the request.
    - Other requests are not served from oversize blocks, so oversize blocks stay whole.
    - If the card has no room for a segment, oversize free blocks of the pool are returned to the card first:
      the smallest block that is as large as the request or, if there is none, the largest blocks until they
      are together as large. All wholly free segments are returned only after that.
    """

    def _take(self, size: int, of: tuple[int, bool]) -> allocator.Block | None:
        pool = self._free[of]
        index = bisect_left(pool, (size, -1))
        if index < len(pool) and not of[1]:
            best = pool[index][0]
            oversize = size >= self.split_limit
            if best >= (size + allocator.LARGE_SEGMENT if oversize else self.split_limit):
                return None
        return super()._take(size, of)

    def _make_room(self, size: int, segment: int, of: tuple[int, bool]) -> None:
        self._release_oversize(size, of)
        if not self._has_room(segment):
            super()._make_room(size, segment, of)

    def _release_oversize(self, size: int, of: tuple[int, bool]) -> None:
        # a block below the limit that is as large as the request would have served the request
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
    """The class of allocator with ``max_split_size_mb`` set to ``mib``."""
    return type("OversizeBlocks", (OversizeBlocks,), {"split_limit": mib * allocator.MIB})


class ExpandableSegments(allocator.CachingAllocator):
    """``expandable_segments:True``: segments grow and shrink by pages.

    - Each stream has one segment for small blocks and one for large ones, which grow by pages of 2 and of
      20 MiB.
    - If no free block can serve a request, the request is served at the lowest address where neighbouring
      free blocks and missing pages are together large enough; the missing pages are mapped.
    - A rest of 512 B or more is split off a block, in large blocks too, so the allocated bytes are the
      requested bytes in whole granules.
    - In best fit a block before missing pages counts as large as it can become, so others are taken first.
    - If the card has no page left, all wholly free pages are unmapped, also within segments, before the
      request is tried again.

    Not replayed: torch reserves 9/8 of the card's memory as addresses of a segment, and begins a second
    segment where the addresses end; the addresses of this model do not end.
    """

    least_rest = allocator.GRANULE

    def __init__(self, capacity: int | None = None):
        super().__init__(capacity)
        # by (stream, whether small): the addresses, ascending, of the ranges without pages
        self._holes: dict[tuple[int, bool], list[int]] = {}

    def _is_hole(self, block: allocator.Block) -> bool:
        holes = self._holes[block.pool]
        at = bisect_left(holes, block.address)
        return at < len(holes) and holes[at] == block.address

    def _may_become(self, address: int) -> int:
        """The bytes of a free block and of the missing pages that follow the block."""
        block = self._blocks[address]
        after = block.next
        return block.size + (after.size if after is not None and self._is_hole(after) else 0)

    def _take(self, size: int, of: tuple[int, bool]) -> allocator.Block | None:
        pool = self._free[of]
        at = bisect_left(pool, (size, -1))
        if at == len(pool):
            return None
        least = self._may_become(pool[at][1])
        while at + 1 < len(pool) and (next_least := self._may_become(pool[at + 1][1])) < least:
            at, least = at + 1, next_least
        block = self._blocks[pool.pop(at)[1]]
        block.free = False
        return block

    def _new_segment(self, size: int, pool: tuple[int, bool]) -> allocator.Block:
        block = self._grown(size, pool)
        if block is None and self.retries:
            self._release_cached()
            block = self._grown(size, pool)
        if block is None:
            raise allocator.OutOfMemory(size, self.allocated, self.reserved, self.retries)
        self._remove_free(block)
        return block

    def _grown(self, size: int, pool: tuple[int, bool]) -> allocator.Block | None:
        """A free block of at least ``size`` bytes, with pages mapped as needed; None: the card has too few
        pages (the pages that were mapped stay)."""
        first = self._lowest_room(size, pool)
        block = self._map(first, min(first.size, size)) if self._is_hole(first) else first
        while block is not None and block.size < size:
            hole = block.next
            assert hole is not None
            block = self._map(hole, min(hole.size, size - block.size))
        return block

    def _lowest_room(self, size: int, pool: tuple[int, bool]) -> allocator.Block:
        """The first block of the lowest neighbouring ones, free or without pages, with room for ``size``."""
        if pool not in self._holes:
            begin = len(self._holes) * _ADDRESSES
            self._blocks[begin] = allocator.Block(begin, _ADDRESSES, pool)
            self._holes[pool] = [begin]
        for address in self._holes[pool]:
            hole = self._blocks[address]
            before = hole.previous
            first = before if before is not None and before.free else hole
            room, block = 0, first
            while room < size and block is not None and (block.free or self._is_hole(block)):
                room, block = room + block.size, block.next  # type: ignore[assignment]
            if room >= size:
                return first
        raise AssertionError("the last range without pages has room for anything")

    def _map(self, hole: allocator.Block, size: int) -> allocator.Block | None:
        """Map the first pages of a range without pages, as many as ``size`` bytes need; returns the free
        block that contains these pages, or None if the card has too few pages."""
        page = self._page(hole.pool)
        mapped = -(-size // page) * page
        if self.capacity is not None and self.reserved + mapped > self.capacity:
            return None
        self._holes[hole.pool].remove(hole.address)
        if mapped < hole.size:
            self._cut(hole, mapped)
            insort(self._holes[hole.pool], hole.address + mapped)
        self.reserved += mapped
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self._join(hole)

    def _release_cached(self) -> None:
        for pool, free in [*self._free.items()]:
            page = self._page(pool)
            for size, address in [*free]:
                begin, end = -(-address // page) * page, (address + size) // page * page
                if begin < end:
                    self._unmap(self._blocks[address], begin, end)

    def _unmap(self, block: allocator.Block, begin: int, end: int) -> None:
        """Unmap the pages of a free block between the addresses ``begin`` and ``end``."""
        self._remove_free(block)
        if block.address < begin:
            before, block = block, self._cut(block, begin - block.address)
            self._add_free(before)
        if end < block.address + block.size:
            self._add_free(self._cut(block, end - block.address))
        self.reserved -= block.size
        self.returned += block.size
        self.returned_s += block.size // self._page(block.pool) * PAGE_S
        holes = self._holes[block.pool]
        if block.next is not None and self._is_hole(block.next):
            holes.remove(block.next.address)
            self._merge(block, block.next)
        if block.previous is not None and self._is_hole(block.previous):
            self._merge(block.previous, block)
        else:
            insort(holes, block.address)

    @staticmethod
    def _page(pool: tuple[int, bool]) -> int:
        return allocator.SMALL_SEGMENT if pool[1] else allocator.LARGE_SEGMENT
