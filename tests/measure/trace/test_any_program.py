"""Any program on the caching allocator and on its rules written again, with both settings of segments.

The rules of torch's caching allocator written again, slowly and plainly (see ``test_allocator``).
"""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.measure.memory.allocator import CachingAllocator, OutOfMemory
from spbench.bench.measure.memory.allocator_settings import ExpandableSegments, unsplit_from

MIB = 2**20


class NaiveAllocator:
    """The allocator with nothing but lists: a segment is [(stream, small), [size, handle or None], ...] in
    order of addresses, and everything is found by looking at all of them."""

    def __init__(self, capacity: int | None, limit: float = float("inf")):
        self.capacity, self.limit = capacity, limit
        self.segments: list[tuple[tuple[int, bool], list[list]]] = []

    @property
    def reserved(self) -> int:
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    @property
    def allocated(self) -> int:
        return sum(size for _, blocks in self.segments for size, handle in blocks if handle is not None)

    def malloc(self, nbytes: int, stream: int, handle: int) -> None:
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        pool = (stream, small)
        found = self._smallest(size, pool)
        if found is None:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.capacity is not None and self.reserved + segment > self.capacity:
                self._release_oversize(max(size, self.limit), pool)
            if self.capacity is not None and self.reserved + segment > self.capacity:
                self.segments = [s for s in self.segments if len(s[1]) > 1 or s[1][0][1] is not None]
            if self.capacity is not None and self.reserved + segment > self.capacity:
                raise OutOfMemory(size, self.allocated, self.reserved)
            self.segments.append((pool, [[segment, None]]))
            blocks, index = self.segments[-1][1], 0
        else:
            blocks, index = found
        remains = blocks[index][0] - size
        if remains >= 512 if small else remains > MIB and size < self.limit:
            blocks[index : index + 1] = [[size, handle], [remains, None]]
        else:
            blocks[index][1] = handle

    def free(self, handle: int) -> None:
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == handle:
                    block[1] = None
            for left in range(len(blocks) - 2, -1, -1):
                if blocks[left][1] is None and blocks[left + 1][1] is None:
                    blocks[left][0] += blocks.pop(left + 1)[0]

    def _smallest(self, size: int, pool: tuple[int, bool]) -> tuple[list[list], int] | None:
        free = [
            (block[0], s, i)
            for s, (kind, blocks) in enumerate(self.segments)
            for i, block in enumerate(blocks)
            if kind == pool and block[1] is None and block[0] >= size
        ]
        if not free:
            return None
        nbytes, segment, index = min(free)
        too_large = size + 20 * MIB if size >= self.limit else self.limit
        return None if nbytes >= too_large else (self.segments[segment][1], index)

    def _release_oversize(self, least: float, pool: tuple[int, bool]) -> None:
        """Return oversize free segments of the pool: the smallest that is large enough, else the largest ones
        until they are together."""
        free = [s for s in self.segments if s[0] == pool and len(s[1]) == 1 and s[1][0][1] is None]
        oversize = sorted((s for s in free if s[1][0][0] >= self.limit), key=lambda s: s[1][0][0])
        enough = [s for s in oversize if s[1][0][0] >= least]
        released = 0
        for segment in enough[:1] or oversize[::-1]:
            if released < least:
                released += segment[1][0][0]
                self.segments = [s for s in self.segments if s is not segment]


class NaiveExpandable:
    """With expandable segments: of each (stream, small) a list of [what, size] in order of addresses, where
    what is a handle, or "free", or "hole" where there are no pages."""

    def __init__(self, capacity: int | None):
        self.capacity = capacity
        self.pools: dict[tuple[int, bool], list[list]] = {}

    def _sum(self, of: object) -> int:
        return sum(n for ranges in self.pools.values() for what, n in ranges if of(what))  # type: ignore[operator]

    @property
    def reserved(self) -> int:
        return self._sum(lambda what: what != "hole")

    @property
    def allocated(self) -> int:
        return self._sum(lambda what: what not in ("hole", "free"))

    def malloc(self, nbytes: int, stream: int, handle: int) -> None:
        size = (nbytes + 511) // 512 * 512
        pool = (stream, size <= MIB)
        ranges = self.pools.setdefault(pool, [["hole", 2**50 * 10 * MIB]])
        at = self._cached(ranges, size)
        if at is None and not self._map(ranges, size, pool):
            for other, its in self.pools.items():
                self._unmap(its, 2 * MIB if other[1] else 20 * MIB)
            if not self._map(ranges, size, pool):
                raise OutOfMemory(size, self.allocated, self.reserved)
        if at is None:  # the lowest that is large enough lies where pages were mapped
            at = self.grown
        rest = ranges[at][1] - size
        ranges[at : at + 1] = [[handle, size], *([["free", rest]] if rest else [])]

    def free(self, handle: int) -> None:
        for ranges in self.pools.values():
            for each in ranges:
                if each[0] == handle:
                    each[0] = "free"
            self._merge(ranges)

    @staticmethod
    def _merge(ranges: list[list]) -> None:
        for left in range(len(ranges) - 2, -1, -1):
            if ranges[left][0] == ranges[left + 1][0] and ranges[left][0] in ("free", "hole"):
                ranges[left][1] += ranges.pop(left + 1)[1]

    @staticmethod
    def _cached(ranges: list[list], size: int) -> int | None:
        def becomes(i: int) -> int:
            return ranges[i][1] + (ranges[i + 1][1] if ranges[i + 1][0] == "hole" else 0)

        fits = [i for i, (what, n) in enumerate(ranges) if what == "free" and n >= size]
        fits.sort(key=lambda i: (ranges[i][1], i))
        while len(fits) > 1 and becomes(fits[1]) < becomes(fits[0]):
            fits.pop(0)
        return fits[0] if fits else None

    def _map(self, ranges: list[list], size: int, pool: tuple[int, bool]) -> bool:
        page = 2 * MIB if pool[1] else 20 * MIB
        starts = [i for i, (what, _) in enumerate(ranges) if what == "hole"]
        starts = [i - 1 if i and ranges[i - 1][0] == "free" else i for i in starts]
        for start in starts:
            end, room = start, 0
            while room < size and end < len(ranges) and ranges[end][0] in ("free", "hole"):
                room, end = room + ranges[end][1], end + 1
            if room >= size:
                break
        while (missing := size - (ranges[start][1] if ranges[start][0] == "free" else 0)) > 0:
            hole = start + (ranges[start][0] == "free")
            more = (min(missing, ranges[hole][1]) + page - 1) // page * page
            if self.capacity is not None and self.reserved + more > self.capacity:
                return False
            rest = ranges[hole][1] - more
            ranges[hole : hole + 1] = [["free", more], *([["hole", rest]] if rest else [])]
            self._merge(ranges)
        self.grown = start
        return True

    def _unmap(self, ranges: list[list], page: int) -> None:
        address, cut = 0, []
        for what, n in ranges:
            first, last = -(-address // page) * page, (address + n) // page * page
            if what == "free" and first < last:
                pieces = [["free", first - address], ["hole", last - first], ["free", address + n - last]]
                cut += [piece for piece in pieces if piece[1]]
            else:
                cut.append([what, n])
            address += n
        ranges[:] = cut
        self._merge(ranges)


KIB = 2**10

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 48 * MIB),
    # at the rules' limits, and a granule to either side
    st.builds(
        lambda base, off: base + off,
        st.sampled_from([512, 9 * MIB + MIB // 2, *(n * MIB for n in (1, 2, 10, 11, 12, 20, 21, 41))]),
        st.sampled_from([-512, -1, 0, 1, 512]),
    ).filter(lambda n: n > 0),
)
#: a size to ask for and a stream, or a number that chooses which live block to free
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
    ),
    max_size=60,
)


ALLOCATORS = {
    "segments": (CachingAllocator, NaiveAllocator),
    "expandable segments": (ExpandableSegments, NaiveExpandable),
    "blocks that are not split": (unsplit_from(21), partial(NaiveAllocator, limit=21 * MIB)),
}


@pytest.mark.parametrize("setting", ALLOCATORS)
@given(STEPS, st.one_of(st.none(), st.integers(20, 130).map(lambda n: n * MIB)))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_any_program_as_the_naive_allocator(
    setting: str, steps: list[tuple[str, int, int]], capacity: int | None
) -> None:
    fast, slow = ALLOCATORS[setting]
    allocator, naive = fast(capacity), slow(capacity)
    live: dict[int, int] = {}  # address to the size of the block, in order of birth
    peak_allocated = peak_reserved = 0
    for kind, value, stream in steps:
        if kind == "free" and live:
            address = list(live)[value % len(live)]
            before = allocator.allocated
            allocator.free(address)
            naive.free(address)
            assert before - allocator.allocated == live.pop(address)
        elif kind == "malloc":
            before = allocator.allocated
            errors: list[tuple[int, int, int]] = []
            address = -1
            try:
                address = allocator.malloc(value, stream)
            except OutOfMemory as error:
                errors.append((error.requested, error.allocated, error.reserved))
            try:
                naive.malloc(value, stream, address)
            except OutOfMemory as error:
                errors.append((error.requested, error.allocated, error.reserved))
            if errors:
                assert len(errors) == 2
                assert errors[0] == errors[1]
            else:
                live[address] = allocator.allocated - before
                assert live[address] >= value
        assert (allocator.allocated, allocator.reserved) == (naive.allocated, naive.reserved)
        assert allocator.allocated <= allocator.reserved
        assert capacity is None or allocator.reserved <= capacity
        peak_allocated = max(peak_allocated, naive.allocated)
        peak_reserved = max(peak_reserved, naive.reserved)
        spans = sorted(live.items())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (peak_allocated, peak_reserved)
    for address in list(live):
        allocator.free(address)
    assert allocator.allocated == 0
    # all neighbours have merged: every segment is whole again, and all of them can be returned
    allocator._release_cached()
    assert allocator.reserved == 0
