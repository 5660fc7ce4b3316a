"""``max_split_size_mb``, each rule by hand; see test_any_program.py too."""

from __future__ import annotations

import pytest

from spbench.bench.measure.memory.allocator import CachingAllocator, OutOfMemory
from spbench.bench.measure.memory.allocator_settings import unsplit_from
from tests.measure.trace.naive_allocator import MIB, NaiveAllocator

LIMIT = 100


def allocator(capacity: int | None = None) -> CachingAllocator:
    """With a limit of 100 MiB, and a capacity in MiB."""
    return unsplit_from(LIMIT)(None if capacity is None else capacity * MIB)


def freed(of: CachingAllocator, *sizes: int) -> None:
    """Have blocks of these MiB free in the cache, a segment each."""
    for address in [of.malloc(size * MIB) for size in sizes]:
        of.free(address)


@pytest.mark.parametrize(
    ("cached", "asked", "allocated", "reserved"),
    [
        # below the limit blocks are split
        (98, 50, 50, 98),
        # an oversize block serves no request below the limit
        (100, 98, 98, 198),
        # it serves one from the limit on, whole, up to 20 MiB less 512 B above what that asks for
        (118, 100, 118, 118),
        (120, 100, 100, 220),
        (118, 117, 118, 118),
    ],
)
def test_which_blocks_serve(cached: int, asked: int, allocated: int, reserved: int) -> None:
    found = allocator()
    freed(found, cached)
    found.malloc(asked * MIB)
    assert (found.allocated, found.reserved) == (allocated * MIB, reserved * MIB)


@pytest.mark.parametrize(
    ("capacity", "cached", "asked", "kept"),
    [
        # the smallest that is as large as the request is returned, the others stay
        (600, (110, 200, 250), 150, (110, 250)),
        # or as large as the limit, for a request below it
        (350, (60, 110, 130), 80, (60, 130)),
        # none is: the largest first, until they are together as large
        (400, (110, 120, 130), 180, (110,)),
        # what is not oversize is returned last, with all the rest
        (300, (90, 110), 280, ()),
    ],
)
def test_what_is_returned_first(
    capacity: int, cached: tuple[int, ...], asked: int, kept: tuple[int, ...]
) -> None:
    found, naive = allocator(capacity), NaiveAllocator(capacity * MIB, LIMIT * MIB)
    freed(found, *cached)
    for handle, size in enumerate(cached):
        naive.malloc(size * MIB, 0, handle)
    for handle in range(len(cached)):
        naive.free(handle)
    found.malloc(asked * MIB)
    naive.malloc(asked * MIB, 0, -1)
    assert found.reserved == naive.reserved == (sum(kept) + asked) * MIB


def test_it_can_be_out_of_memory() -> None:
    found = allocator(200)
    freed(found, 150)
    with pytest.raises(OutOfMemory, match=r"^221249536 bytes with 0 allocated, 0 reserved"):
        found.malloc(211 * MIB)
