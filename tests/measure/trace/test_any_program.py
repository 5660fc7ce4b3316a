"""Any program on the caching allocator and on its rules written again, with both settings of segments."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.measure.memory.allocator import CachingAllocator, OutOfMemory
from spbench.bench.measure.memory.allocator_settings import ExpandableSegments, unsplit_from
from tests.measure.trace.naive_allocator import MIB, NaiveAllocator, NaiveExpandable

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
