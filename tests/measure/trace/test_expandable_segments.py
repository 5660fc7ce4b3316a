"""Segments that grow by pages, each rule by hand (c10/cuda/CUDACachingAllocator.cpp: find_expandable_block,
map_block, unmap_block, get_free_block, should_split)."""

from __future__ import annotations

import pytest

from spbench.bench.measure.memory.allocator import CachingAllocator, OutOfMemory, replay
from spbench.bench.measure.memory.allocator_settings import ExpandableSegments
from tests.measure.trace.naive_allocator import MIB


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
def test_requests_on_an_empty_card(requests: list[int], allocated: int, reserved: int) -> None:
    allocator = ExpandableSegments()
    for size in requests:
        allocator.malloc(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_longer_request_extends_what_lies_free_at_the_end() -> None:
    """What segments of their own cannot: the slivers of the note, each step a little larger."""
    requests = [(n, f) for n in range(40, 100, 10) for f in (1, 2)]
    reserved = {}
    for kind in (CachingAllocator, ExpandableSegments):
        allocator = kind()
        for n, factor in requests:
            allocator.free(allocator.malloc(n * factor * MIB))
        reserved[kind] = allocator.reserved
    assert reserved == {
        CachingAllocator: (40 + 80 + 100 + 120 + 140 + 160 + 180) * MIB,
        ExpandableSegments: 180 * MIB,
    }


def test_blocks_before_missing_pages_are_taken_last() -> None:
    allocator = ExpandableSegments()
    first = allocator.malloc(30 * MIB)
    held = allocator.malloc(25 * MIB)  # 5 MiB of 60 remain at the end, before pages that may come
    allocator.free(first)
    # 5 fit best, but can grow
    assert allocator.malloc(4 * MIB) == first
    assert allocator.malloc(30 * MIB) > held
    assert allocator.reserved == 100 * MIB


def test_free_pages_within_a_segment_are_returned_and_filled_again() -> None:
    allocator = ExpandableSegments(capacity=100 * MIB)
    small = allocator.malloc(512)
    first, middle = allocator.malloc(10 * MIB), allocator.malloc(60 * MIB)
    last = allocator.malloc(10 * MIB)
    allocator.free(middle)
    assert allocator.reserved == 82 * MIB
    # other streams cannot use what lies free, but pages: those from 20 to 60 MiB go, those around are shared
    other = allocator.malloc(40 * MIB, stream=1)
    assert (allocator.reserved, allocator.peak_reserved) == (82 * MIB - 40 * MIB + 40 * MIB, 82 * MIB)
    allocator.free(other)
    assert allocator.malloc(60 * MIB) == middle
    assert [sum(size for _, size, _ in blocks) for blocks in allocator.segments()] == [2 * MIB, 80 * MIB]
    for address in (small, first, middle, last):
        allocator.free(address)


def test_out_of_memory_counts_pages() -> None:
    allocator = ExpandableSegments(capacity=39 * MIB)
    allocator.malloc(19 * MIB)
    with pytest.raises(OutOfMemory) as raised:
        allocator.malloc(2 * MIB)  # 20 MiB of the card are left, less one
    assert (raised.value.requested, raised.value.allocated, raised.value.reserved) == (
        2 * MIB,
        19 * MIB,
        20 * MIB,
    )
    allocator.malloc(MIB)
    assert allocator.reserved == 22 * MIB


def test_a_log_fits_where_segments_of_their_own_do_not() -> None:
    sizes, events = [60 * MIB, 30 * MIB, 20 * MIB, 45 * MIB], [1, -1, 2, 3, -2, 4]
    # 30 and 10 of 60 MiB lie free around 20: a segment of its own takes 46 more; or the 10 grow by two pages,
    # of which one is the first of the 30
    for kind, needs in ((CachingAllocator, 106 * MIB), (ExpandableSegments, 80 * MIB)):
        assert replay(sizes, events, needs, kind=kind).peak_reserved == needs
        assert replay(sizes, events, needs - 1, kind=kind).out_of_memory is not None
