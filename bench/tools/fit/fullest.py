"""How small a card the ranks of a cell would fit, and which of them need the largest."""

from __future__ import annotations

from spbench.bench.measure.engines.rank_memory import allocator_of
from spbench.bench.measure.engines.usable_memory import usable_memory_bytes
from spbench.bench.measure.engines.virtual import ClassTraces
from spbench.bench.measure.memory.allocator import SEGMENT_GRANULE, CachingAllocator
from spbench.bench.measure.memory.repeated_events import stretches
from spbench.bench.measure.memory.replay import replay
from spbench.bench.measure.trace.memory_log import MemoryLog

#: how exactly the smallest card is found: a segment, or this part of it
_NEAR = 1e-3


def least_usable(
    log: MemoryLog,
    low: int,
    high: int,
    kind: type[CachingAllocator] = CachingAllocator,
    usable: int | None = None,
) -> int:
    """Usable bytes of the smallest card on which the allocator serves a log, to 2 MiB or 0.1%; what it needs
    may be more than what is given out, as free blocks between others are too small.

    A larger card does not always serve what a smaller one does: blocks are given back where room is short,
    and what is asked for later finds other gaps. So the answer is held to the card that is asked about: at
    most its bytes if that serves the log, and more if it does not.

    Args:
        low: bytes with which it cannot, or just can: those that are given out at once at the most.
        high: bytes with which it can.
        kind: the allocator.
        usable: bytes of the card that is asked about; None: of no one card.
    """
    repeated = stretches(log.sizes, log.events, log.streams)

    def serves(nbytes: int) -> bool:
        return replay(log.sizes, log.events, nbytes, (), log.streams, kind, repeated).out_of_memory is None

    if usable is not None and low <= usable < high:
        low, high = (low, usable) if serves(usable) else (usable, high)
    while high - low > max(SEGMENT_GRANULE, _NEAR * low):
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return high


def fullest(traces: ClassTraces) -> tuple[int, int]:
    """The place of the class of ranks that needs the largest card, and the usable bytes of that card: where
    some do not fit the cell's own, one of these, which needs more than that has; else at most what it has."""
    kind, usable = allocator_of(traces.cell), usable_memory_bytes(traces.cell)
    oom = [each.status == "oom" for each in traces.by_class]
    candidates = [at for at in range(len(oom)) if oom[at] or not any(oom)]

    def most(at: int, name: str) -> int:
        return max(int(entry[name]) for entry in traces.by_class[at].by_class)

    found, least = 0, 0
    for at in sorted(candidates, key=lambda at: -most(at, "peak_memory_bytes")):
        low, high = most(at, "peak_memory_bytes"), most(at, "reserved_memory_bytes")
        if high > least:  # none needs more than it reserves where nothing is given back
            needed = least_usable(traces.traces[at].memory, low, high, kind, usable)
            found, least = (at, needed) if needed > least else (found, least)
    return found, least
