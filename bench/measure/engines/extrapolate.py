"""Guess what a cell needs of its card and of its host at any size, from traces of few layers.

Within one program, the size of each storage is a polynomial of degree two in the batch or the sequence
length. So two or three guessed traces (:func:`measure.engines.tracing.trace`) give the whole curve of live
bytes at any size, and its peak is the largest over all phases, whichever it is. The overall peak alone must
not be extrapolated: which phase it falls in changes with the size.

Where another program runs (a longer sequence has more tiles), no other size says what one needs: the very
size is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.deepened_traces import Effort
from spbench.bench.measure.engines.rank_memory import allocator_of, host_peaks, part_of_host
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.memory.allocator import replay
from spbench.bench.measure.trace.memory_log import MemoryLog


class Guesses:
    """What a cell needs by size: extrapolated where one program runs, else of a trace of that size.

    Args:
        cell: of which sizes are asked; all of its ranks are taken to hold as much on hosts as the traced.
        trace: gives the trace of a size, at that effort.
        points: sizes to extrapolate from; as many as the degree of its sizes plus one.
        capacity: bytes of the card that tensors can have.

    Attributes:
        extrapolates: whether one program runs, as far as is known.
    """

    def __init__(
        self, cell: Cell, trace: Callable[[int, Effort], Trace], points: Sequence[int], capacity: int
    ):
        self._cell, self._trace, self._capacity = cell, trace, capacity
        self._samples = {point: _memories(trace(point, "guess")) for point in points}
        self._smallest = min(points)
        events = [_events(each) for each in self._samples.values()]
        self.extrapolates = all(each == events[0] for each in events)
        self._program = cache(lambda size: _events(_memories(trace(size, "few"))))
        self.memories = lru_cache(maxsize=1)(self._memories)
        self._forget()

    def _forget(self) -> None:
        """Forget all that is guessed of sizes, but for those that are sampled."""
        self.memories.cache_clear()
        self._needs = {0: 0.0} | {point: self._need(*logs) for point, logs in self._samples.items()}
        self._served: dict[int, bool] = {}

    def _memories(self, size: int) -> list[MemoryLog]:
        """The logs of the memory of the card and of the host at a size, by Lagrange's formula."""
        if not self.extrapolates:
            return _memories(self._trace(size, "guess"))
        weights = [
            np.prod([(size - other) / (point - other) for other in self._samples if other != point])
            for point in self._samples
        ]
        extrapolated = []
        for logs in zip(*self._samples.values(), strict=True):
            sizes = np.rint(weights @ np.array([log.sizes for log in logs])).astype(np.int64)
            extrapolated.append(replace(logs[0], sizes=sizes.tolist()))
        return extrapolated

    def confirm(self, size: int) -> bool:
        """Whether the size runs the program that it is guessed by; if not, sizes are traced from now on."""
        if self.extrapolates and self._program(size) != self._program(self._smallest):
            self.extrapolates = False
            self._forget()
            return False
        return True

    def need(self, size: int) -> float:
        """The need as a part of what there is, of the card or of the host, whichever is larger."""
        return self._need(*self.memories(size))

    def _need(self, card: MemoryLog, host: MemoryLog) -> float:
        on_card = np.cumsum(card.signed_bytes())[card.step_start :].max() / self._capacity
        return max(on_card, part_of_host(self._cell, host_peaks(host)[-1]))

    def served(self, size: int) -> bool:
        """Whether the allocator of the card serves the step."""
        if size not in self._served:
            log, kind = self.memories(size)[0], allocator_of(self._cell)
            replayed = replay(log.sizes, log.events, self._capacity, (), log.streams, kind)
            self._served[size] = replayed.out_of_memory is None
        return self._served[size]

    def last_that_fits(self, low: int, high: int) -> int:
        """The last size from ``low`` on, and below ``high``, of which the need is no more than there is;
        ``low`` if there is none. Needs of cards grow nearly in a line with the size, which says where to
        look; those of hosts in steps, so every third look is in the middle, by factors."""
        needs = self._needs
        low = max([low, *(n for n in needs if n < high and needs[n] <= 1)])
        high = min([high, *(n for n in needs if n > low and needs[n] > 1)])
        while high - low > 1:
            at = middle = math.isqrt(max(low, 1) * high)
            near = [max(n for n in needs if n <= low), *sorted(n for n in needs if n > low)[:1]]
            a, b = near if len(near) == 2 else sorted(needs)[-2:]
            slope = (needs[b] - needs[a]) / (b - a)
            if len(needs) % 3 and slope > 0:  # not far beyond what is known, where a step may have many tiles
                at = min(a + int((1 - needs[a]) / slope), max(8 * b, middle))
            at = max(low + 1, min(high - 1, at))
            needs[at] = self.need(at)
            low, high = (at, high) if needs[at] <= 1 else (low, at)
        return low


def _memories(trace: Trace) -> list[MemoryLog]:
    return [trace.memory, trace.host_memory]


def _events(memories: Sequence[MemoryLog]) -> list[list[int]]:
    return [log.events for log in memories]
