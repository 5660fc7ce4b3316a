"""The caching allocator's replay: each rule of torch's by hand, and any program on it beside the rules
written again, slowly and plainly. Rules: c10/cuda/CUDACachingAllocator.cpp (malloc, get_free_block,
should_split, get_allocation_size, alloc_found_block, free_block, try_merge_blocks, release_cached_blocks),
with default settings, with max_split_size_mb, and with segments that grow by pages (find_expandable_block,
map_block, unmap_block)."""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.measure.memory.allocator import BYTE_S, SEGMENT_S, CachingAllocator, OutOfMemory, replay
from spbench.bench.measure.memory.allocator_settings import PAGE_S, ExpandableSegments, unsplit_from
from tests.grid import tabled

MIB = 2**20


def give_back(allocator: CachingAllocator, address: int) -> None:
    allocator.give_back(allocator._blocks[address])


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
    peak_reserved = 0
    for kind, value, stream in steps:
        if kind == "free" and live:
            address = list(live)[value % len(live)]
            before = allocator.allocated
            give_back(allocator, address)
            naive.free(address)
            assert before - allocator.allocated == live.pop(address)
        elif kind == "malloc":
            before = allocator.allocated
            errors: list[tuple[int, int, int]] = []
            address = -1
            try:
                address = allocator.take(value, stream).address
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
        peak_reserved = max(peak_reserved, naive.reserved)
        spans = sorted(live.items())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert allocator.peak_reserved == peak_reserved
    for address in list(live):
        give_back(allocator, address)
    assert allocator.allocated == 0
    # all neighbours have merged: every segment is whole again, and all of them can be returned
    allocator._release_cached()
    assert allocator.reserved == 0


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        # sizes are whole granules of 512 B
        ([1], 512, 2 * MIB),
        ([512], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([1023, 1], 1536, 2 * MIB),
        # up to 1 MiB: segments of 2 MiB, cut to the granule
        ([MIB], MIB, 2 * MIB),
        ([MIB - 511], MIB, 2 * MIB),
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB - 512, 512], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([700 * KIB] * 3, 2100 * KIB, 4 * MIB),
        # above 1 MiB and below 10 MiB: segments of 20 MiB
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([10 * MIB - 512], 10 * MIB - 512, 20 * MIB),
        ([9 * MIB, 9 * MIB], 18 * MIB, 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB, 20 * MIB),
        # what remains is exactly 1 MiB: not cut, and counted whole
        ([9 * MIB + MIB // 2] * 2, 20 * MIB, 20 * MIB),
        # 512 B more remain: cut, and a request for more than 1 MiB is served from it
        ([9 * MIB + MIB // 2, 9 * MIB + MIB // 2 - 512, MIB + 512], 20 * MIB, 20 * MIB),
        # from 10 MiB on: a segment of the request, rounded to 2 MiB
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB - 511], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),  # 2 MiB less 512 B remain: cut
        ([11 * MIB - 512], 11 * MIB - 512, 12 * MIB),  # 1 MiB and 512 B remain: cut
        ([11 * MIB], 12 * MIB, 12 * MIB),  # 1 MiB remains: not cut
        ([11 * MIB + 1], 12 * MIB, 12 * MIB),
        ([25 * MIB], 26 * MIB, 26 * MIB),
        # the pools do not mix: 18 MiB are free in the large one, 1.5 in the small one
        ([2 * MIB, MIB // 2], 2 * MIB + MIB // 2, 22 * MIB),
        ([MIB // 2, MIB + 512], MIB // 2 + MIB + 512, 22 * MIB),
    ],
)
def test_requests_on_an_empty_card(requests: list[int], allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    for size in requests:
        allocator.take(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_best_fit_and_lowest_address_among_equals() -> None:
    allocator = CachingAllocator()
    # one segment of 20 MiB: free holes of 4, 3 and 3 MiB between blocks that stay, then 4 MiB
    four, _, three, _, other_three, _ = (allocator.take(n * MIB).address for n in (4, 2, 3, 2, 3, 2))
    assert allocator.reserved == 20 * MIB
    for hole in (four, other_three, three):
        give_back(allocator, hole)
    assert allocator.take(3 * MIB).address == three
    assert allocator.take(3 * MIB - MIB // 2).address == other_three  # the smallest that is large enough
    assert allocator.take(3 * MIB + MIB // 2).address == four
    assert allocator.allocated == (2 + 2 + 2 + 3 + 3 + 4) * MIB  # the last two are not cut
    assert allocator.reserved == 20 * MIB


def test_cached_block_of_any_size_serves_a_smaller_request() -> None:
    allocator = CachingAllocator()
    give_back(allocator, allocator.take(100 * MIB).address)
    allocator.take(2 * MIB)  # no segment of 20 MiB is made while one of 100 lies free
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 100 * MIB)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_merge_on_both_sides(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(6 * MIB).address for _ in range(3)]
    for index in order:
        give_back(allocator, blocks[index])
    assert allocator.allocated == 0
    assert allocator.take(20 * MIB).address == blocks[0]  # the whole segment, with the 2 MiB never asked for
    assert allocator.reserved == 20 * MIB


def test_blocks_of_different_segments_do_not_merge() -> None:
    allocator = CachingAllocator()
    first, second = allocator.take(10 * MIB).address, allocator.take(10 * MIB).address
    give_back(allocator, first)
    give_back(allocator, second)
    allocator.take(20 * MIB)
    assert allocator.reserved == 40 * MIB


def test_wholly_free_segments_are_returned_before_an_out_of_memory() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    cached = allocator.take(30 * MIB).address
    small = allocator.take(KIB).address
    held = allocator.take(12 * MIB).address
    give_back(allocator, cached)
    give_back(allocator, small)
    assert allocator.reserved == 44 * MIB
    allocator.take(40 * MIB)  # 44 + 40 is too much: the 30 and the 2 free MiB go back
    assert (allocator.allocated, allocator.reserved) == (52 * MIB, 52 * MIB)
    assert allocator.peak_reserved == 52 * MIB
    give_back(allocator, held)
    with pytest.raises(OutOfMemory) as raised:
        allocator.take(26 * MIB)  # and the 12 go back, but 40 + 26 is still too much
    assert (raised.value.requested, raised.value.allocated, raised.value.reserved) == (
        26 * MIB,
        40 * MIB,
        40 * MIB,
    )
    allocator.take(24 * MIB)  # all 64 can be used
    assert allocator.reserved == 64 * MIB


def test_a_segment_that_is_partly_used_is_not_returned() -> None:
    allocator = CachingAllocator(capacity=32 * MIB)
    allocator.take(2 * MIB)  # 18 MiB of its segment lie free
    with pytest.raises(OutOfMemory) as raised:
        allocator.take(19 * MIB)  # 12 MiB of the card and 18 cached: but not in one piece
    error = raised.value
    assert (error.requested, error.allocated, error.reserved) == (19 * MIB, 2 * MIB, 20 * MIB)
    allocator.take(18 * MIB)  # what is cached serves


def test_a_small_request_can_run_out_where_large_ones_lie_free() -> None:
    allocator = CachingAllocator(capacity=20 * MIB)
    allocator.take(2 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.take(1)


def test_a_replay_gives_the_block_of_each_storage_and_what_was_reserved_by_then() -> None:
    quarter = MIB // 4
    # 49.25 MiB in a segment of 50: 0.75 MiB are not cut off. 0 bytes have no block. 3 MiB of 20; then 8.5 of
    # the 17 that are left, and 8.5 of 8.5
    sizes = [197 * quarter, 0, 3 * MIB, 34 * quarter, 31 * quarter]
    events = [1, 2, 3, -1, 4, -2, 5, -3]
    found = replay(sizes, events, None, stops=[1, 3, 8])
    assert found.blocks == [50 * MIB, 0, 3 * MIB, 34 * quarter, 34 * quarter]
    assert found.reserved == [50 * MIB, 70 * MIB, 70 * MIB]
    assert found.peak_reserved == 70 * MIB


def test_a_stream_takes_nothing_of_another_ones_segments() -> None:
    # 6 MiB are made and freed on the first stream: the second has a segment of its own, the first the old one
    sizes, events = [6 * MIB, 6 * MIB, 6 * MIB], [1, -1, 2, 3]
    assert replay(sizes, events, None, streams=[0, 1, 0]).peak_reserved == 40 * MIB
    assert replay(sizes, events, None).peak_reserved == 20 * MIB
    # where the card is full, what is free goes back to it, whichever stream had it
    assert replay(sizes[:2], events[:3], 20 * MIB, streams=[0, 1]).out_of_memory is None


def test_replay_counts_peaks_and_stops_at_the_failure() -> None:
    sizes = [30 * MIB, 0, 16 * MIB, 40 * MIB, 8 * MIB]
    events = [1, 2, 3, -1, -2, 4, 5, -5, -3, -4]
    free = replay(sizes, events, None)
    assert (free.peak_reserved, free.out_of_memory) == (86 * MIB, None)
    fits = replay(sizes, events, 76 * MIB, stops=[5, 6, 10])
    seconds = SEGMENT_S + 30 * MIB * BYTE_S
    assert fits.returned == [
        (0, 0.0),
        (30 * MIB, seconds),
        (30 * MIB, seconds),
    ]  # 40 MiB more than fit beside
    assert (fits.peak_reserved, fits.out_of_memory) == (76 * MIB, None)
    fails = replay(sizes, events, 76 * MIB - 1)
    assert fails.peak_reserved == 56 * MIB
    assert (fails.events, fits.events) == (6, 10)
    error = fails.out_of_memory
    assert (error.requested, error.allocated, error.reserved) == (8 * MIB, 56 * MIB, 56 * MIB)


LIMIT = 100


def allocator(capacity: int | None = None) -> CachingAllocator:
    """With a limit of 100 MiB, and a capacity in MiB."""
    return unsplit_from(LIMIT)(None if capacity is None else capacity * MIB)


def freed(of: CachingAllocator, *sizes: int) -> None:
    """Have blocks of these MiB free in the cache, a segment each."""
    for address in [of.take(size * MIB).address for size in sizes]:
        give_back(of, address)


@tabled(__file__, "which_blocks_serve")
def test_which_blocks_serve(cached: int, asked: int, allocated: int, reserved: int) -> None:
    found = allocator()
    freed(found, cached)
    found.take(asked * MIB)
    assert (found.allocated, found.reserved) == (allocated * MIB, reserved * MIB)


@tabled(__file__, "what_is_returned_first")
def test_what_is_returned_first(
    capacity: int, cached: tuple[int, ...], asked: int, kept: tuple[int, ...]
) -> None:
    found, naive = allocator(capacity), NaiveAllocator(capacity * MIB, LIMIT * MIB)
    freed(found, *cached)
    for handle, size in enumerate(cached):
        naive.malloc(size * MIB, 0, handle)
    for handle in range(len(cached)):
        naive.free(handle)
    found.take(asked * MIB)
    naive.malloc(asked * MIB, 0, -1)
    assert found.reserved == naive.reserved == (sum(kept) + asked) * MIB


def test_it_can_be_out_of_memory() -> None:
    found = allocator(200)
    freed(found, 150)
    with pytest.raises(OutOfMemory, match=r"^221249536 bytes with 0 allocated, 0 reserved"):
        found.take(211 * MIB)


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([MIB, MIB, 512], 2 * MIB + 512, 4 * MIB),  # one segment, of two pages
        ([MIB + 512], MIB + 512, 20 * MIB),
        ([11 * MIB], 11 * MIB, 20 * MIB),  # 9 MiB remain, and the block is no larger than what was asked for
        ([25 * MIB], 25 * MIB, 40 * MIB),
        ([25 * MIB, 15 * MIB], 40 * MIB, 40 * MIB),  # what remains of the second page serves
        ([25 * MIB, 16 * MIB], 41 * MIB, 60 * MIB),  # 15 MiB remain, to which a page is added
        ([MIB // 2, 25 * MIB], 25 * MIB + MIB // 2, 42 * MIB),  # the pools have segments of their own
    ],
)
def test_requests_on_an_empty_card_by_segments(requests: list[int], allocated: int, reserved: int) -> None:
    allocator = ExpandableSegments()
    for size in requests:
        allocator.take(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_longer_request_extends_what_lies_free_at_the_end() -> None:
    """What segments of their own cannot: the slivers of the note, each step a little larger."""
    requests = [(n, f) for n in range(40, 100, 10) for f in (1, 2)]
    reserved = {}
    for kind in (CachingAllocator, ExpandableSegments):
        allocator = kind()
        for n, factor in requests:
            give_back(allocator, allocator.take(n * factor * MIB).address)
        reserved[kind] = allocator.reserved
    assert reserved == {
        CachingAllocator: (40 + 80 + 100 + 120 + 140 + 160 + 180) * MIB,
        ExpandableSegments: 180 * MIB,
    }


def test_blocks_before_missing_pages_are_taken_last() -> None:
    allocator = ExpandableSegments()
    first = allocator.take(30 * MIB).address
    held = allocator.take(25 * MIB).address  # 5 MiB of 60 remain at the end, before pages that may come
    give_back(allocator, first)
    # 5 fit best, but can grow
    assert allocator.take(4 * MIB).address == first
    assert allocator.take(30 * MIB).address > held
    assert allocator.reserved == 100 * MIB


def test_free_pages_within_a_segment_are_returned_and_filled_again() -> None:
    allocator = ExpandableSegments(capacity=100 * MIB)
    small = allocator.take(512).address
    first, middle = allocator.take(10 * MIB).address, allocator.take(60 * MIB).address
    last = allocator.take(10 * MIB).address
    give_back(allocator, middle)
    assert allocator.reserved == 82 * MIB
    # other streams cannot use what lies free, but pages: those from 20 to 60 MiB go, those around are shared
    other = allocator.take(40 * MIB, stream=1).address
    assert allocator.returned_s == 2 * PAGE_S  # two pages of 20 MiB
    assert (allocator.reserved, allocator.peak_reserved) == (82 * MIB - 40 * MIB + 40 * MIB, 82 * MIB)
    give_back(allocator, other)
    assert allocator.take(60 * MIB).address == middle
    assert [sum(size for _, size, _ in blocks) for blocks in allocator.segments()] == [2 * MIB, 80 * MIB]
    for address in (small, first, middle, last):
        give_back(allocator, address)


def test_out_of_memory_counts_pages() -> None:
    allocator = ExpandableSegments(capacity=39 * MIB)
    allocator.take(19 * MIB)
    with pytest.raises(OutOfMemory) as raised:
        allocator.take(2 * MIB)  # 20 MiB of the card are left, less one
    assert (raised.value.requested, raised.value.allocated, raised.value.reserved) == (
        2 * MIB,
        19 * MIB,
        20 * MIB,
    )
    allocator.take(MIB)
    assert allocator.reserved == 22 * MIB


def test_a_log_fits_where_segments_of_their_own_do_not() -> None:
    sizes, events = [60 * MIB, 30 * MIB, 20 * MIB, 45 * MIB], [1, -1, 2, 3, -2, 4]
    # 30 and 10 of 60 MiB lie free around 20: a segment of its own takes 46 more; or the 10 grow by two pages,
    # of which one is the first of the 30
    for kind, needs in ((CachingAllocator, 106 * MIB), (ExpandableSegments, 80 * MIB)):
        assert replay(sizes, events, needs, kind=kind).peak_reserved == needs
        assert replay(sizes, events, needs - 1, kind=kind).out_of_memory is not None
