"""A replay that leaves out periods which repeat, beside one that serves each event."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from spbench.bench.measure.memory import replay as replaying
from spbench.bench.measure.memory.allocator import Block, CachingAllocator, without_retries
from spbench.bench.measure.memory.allocator_settings import ExpandableSegments, unsplit_from
from spbench.bench.measure.memory.replay import replay, stretches
from tests.measure.trace.naive_allocator import MIB

ALLOCATORS: dict[str, type[CachingAllocator]] = {
    "segments": CachingAllocator,
    "segments without retries": without_retries(CachingAllocator),
    "expandable segments": ExpandableSegments,
    "blocks that are not split": unsplit_from(21),
}
#: requests: of the small pool, of segments of 20 MiB, of segments of their own
SIZES = (0, 1, 700, 64 * 2**10, MIB, MIB + 1, 3 * MIB, 9 * MIB, 12 * MIB, 21 * MIB, 30 * MIB)


def in_order(lives: list[tuple[float, float, int, int]]) -> tuple[list[int], list[int], list[int]]:
    """Sizes, events and streams of storages that are (born at, dead at, of so many bytes, on a stream)."""
    lives = sorted(lives)
    births = [(life[0], number) for number, life in enumerate(lives, start=1)]
    deaths = [(life[1], -number) for number, life in enumerate(lives, start=1)]
    events = [number for time, number in sorted(births + deaths) if time < float("inf")]
    return [life[2] for life in lives], events, [life[3] for life in lives]


def periodic(seed: int) -> tuple[list[int], list[int], list[int]]:
    """A program with a loop between others; in some each step leaves something, or the loop is disturbed."""
    some = random.Random(seed)
    periods = some.randint(150, 400)

    def life(earliest: float, latest: float, longest: float) -> tuple[float, float, int, int]:
        born = some.uniform(earliest, latest)
        return born, born + some.uniform(0, longest), some.choice(SIZES), some.randint(0, 1)

    lives = [life(-10, 0, 10) for _ in range(some.randint(0, 12))]
    lives = [(a, b if b < 0 else b + periods, size, stream) for a, b, size, stream in lives]
    for _ in range(some.randint(1, 5)):
        born, dead, size, stream = life(0, 1, some.choice((0.5, 1, 3)))
        lasting = float("inf") if some.random() < 0.05 else 0
        lives += [(born + step, dead + step + lasting, size, stream) for step in range(periods)]
    if some.random() < 0.3:  # one step is another, in some before the cycle is known
        lives.append(life(0, some.choice((10, periods)), periods))
    lives += [life(periods, periods + 10, 10) for _ in range(some.randint(0, 12))]
    return in_order(lives)


def outcome(found: replaying.Replay) -> tuple[Any, ...]:
    """All of a replay, with the state in which it failed in figures."""
    error = found.out_of_memory
    failed = None if error is None else (error.requested, error.allocated, error.reserved, error.retried)
    return (*(vars(found)[name] for name in vars(found) if name != "out_of_memory"), failed)


def counting(kind: type[CachingAllocator], served: Counter[str]) -> type[CachingAllocator]:
    """The allocator, which counts the requests that it serves."""

    class Counting(kind):  # type: ignore[valid-type,misc]
        def take(self, nbytes: int, stream: int = 0) -> Block:
            served["requests"] += 1
            return super().take(nbytes, stream)

    return Counting


def differing(kind: type[CachingAllocator], programs: int) -> tuple[list[int], float]:
    """The seeds of programs whose replays differ, and which part of all requests the quick one serves."""
    differ, quick, plain = [], Counter[str](), Counter[str]()
    for seed in range(programs):
        sizes, events, streams = periodic(seed)
        repeated = stretches(sizes, events, streams)
        some = random.Random(seed)
        stops = sorted(some.randrange(len(events) + 1) for _ in range(5))

        def both(capacity: int | None) -> list[tuple[Any, ...]]:
            given = sizes, events, capacity, stops, streams  # noqa: B023
            return [
                outcome(replay(*given, counting(kind, plain))),
                outcome(replay(*given, counting(kind, quick), repeated)),  # noqa: B023
            ]

        whole, left_out = both(None)
        allocated, reserved = whole[:2]
        tight = [both(some.randint(allocated * 2 // 3, reserved)) for _ in range(3)]
        if whole != left_out or any(a != b for a, b in tight):
            differ.append(seed)
    return differ, quick["requests"] / plain["requests"]


@pytest.mark.parametrize("setting", ALLOCATORS)
def test_what_repeats_may_be_left_out(setting: str) -> None:
    differ, part = differing(ALLOCATORS[setting], 40)
    assert not differ
    assert part < 0.6


def test_cycles_that_are_not_compared_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying._Replaying, "_repeats", lambda *_: True)
    for kind in ALLOCATORS.values():
        assert differing(kind, 40)[0]


def test_what_a_loop_leaves_is_seen_however_little_it_is() -> None:
    periods = 9000
    steps = [(float(n), n + 0.5, 2 * MIB, 0) for n in range(periods)]
    leaks = [(n + 0.25, float("inf"), 1, 0) for n in range(periods)]
    with_leaks, without = in_order(steps + leaks), in_order(steps)
    for sizes, events, streams in (with_leaks, without):
        repeated = stretches(sizes, events, streams)
        assert [each.end - each.first for each in repeated] == [len(events)]
        served = Counter[str]()
        found = replay(sizes, events, None, (), streams, counting(CachingAllocator, served), repeated)
        assert found == replay(sizes, events, None, (), streams)
        leaked = 512 * (len(sizes) - periods)
        assert found.peak_allocated == 2 * MIB + leaked
        assert found.peak_reserved == 20 * MIB + -(-leaked // (2 * MIB)) * 2 * MIB
        assert (served["requests"] < 10) == (not leaked)


def test_a_step_that_is_another_one_ends_a_stretch() -> None:
    sizes, events, streams = in_order([(float(n), n + 1.5, MIB, 0) for n in range(1000)])
    assert len(stretches(sizes, events, streams)) == 1
    larger, elsewhere = [*sizes], [*streams]
    larger[700], elsewhere[700] = 2 * MIB, 1
    for changed in ((larger, streams), (sizes, elsewhere)):
        first, second = stretches(changed[0], events, changed[1])
        number = events[first.end]
        assert (number, events[second.first - 1]) == (701, 701)
