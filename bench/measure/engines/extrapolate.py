"""Predict the peak memory of a cell at any size from traces of a few small sizes.

Within one program, the size of each storage is a polynomial of degree two in the batch or the sequence
length. So two or three guessed traces (:func:`measure.engines.tracing.trace`) give the whole curve of live
bytes at any size, and its peak is the largest over all phases, whichever it is. The overall peak alone must
not be extrapolated: which phase it falls in changes with the size.

Where each size runs a program of its own (a longer sequence has more tiles), no other size says what one
needs; :class:`Needs` guesses the trace of the very size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, cached_property

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.rank_memory import host_peaks, part_of_host
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.trace.memory_log import MemoryLog


class NotOneProgram(ValueError):
    """The traces are not of one program, so that their storages do not correspond."""


class PeakModel:
    """Peak allocated bytes of the step at any size.

    Args:
        trace: gives the memory log at a size.
        points: sizes within one program; as many as the degree of its sizes plus one.
        few: as ``trace``, of few layers alone; these say which program runs.

    Raises:
        NotOneProgram: the points do not lie within one program.
    """

    def __init__(
        self,
        trace: Callable[[int], MemoryLog],
        points: Sequence[int],
        few: Callable[[int], MemoryLog] | None = None,
    ):
        self._few = few or trace
        logs = [trace(x) for x in points]
        if any(log.events != logs[0].events for log in logs):
            raise NotOneProgram(
                f"the order of allocations differs between sizes {', '.join(map(str, points))}"
            )
        self.log, self.points = logs[0], points
        self._samples = [np.asarray(log.sizes, dtype=np.float64) for log in logs]

    def sizes(self, x: int) -> np.ndarray:
        """Bytes of each storage at size x, by Lagrange's formula."""
        sizes = np.zeros_like(self._samples[0])
        for i, (xi, sample) in enumerate(zip(self.points, self._samples, strict=True)):
            others = [xj for j, xj in enumerate(self.points) if j != i]
            sizes += sample * np.prod([(x - xj) / (xi - xj) for xj in others])
        return np.rint(sizes).astype(np.int64)

    def resized(self, log: MemoryLog, x: int, to: int) -> list[int]:
        """The storages of a whole trace at size x as they would be at another size.

        A storage of the whole trace has the bytes of some storage of the guessed one, made likewise before
        the step or in it, and grows with that. One that has no such likeness does not depend on the size.
        """
        sizes, grown = self.sizes(x).tolist(), self.sizes(to).tolist()
        kinds = zip(self.log.born_before_step(), sizes, strict=True)
        size_of = dict(zip(kinds, grown, strict=True))
        return [size_of.get(kind, kind[1]) for kind in zip(log.born_before_step(), log.sizes, strict=True)]

    @cached_property
    def _program(self) -> list[int]:
        return self._few(self.points[0]).events

    def same_program(self, x: int) -> bool:
        """Whether the program at size x is the one that was sampled."""
        return self._few(x).events == self._program

    def __call__(self, x: int) -> int:
        """Peak allocated bytes at size x."""
        return int(np.cumsum(self.log.signed_bytes(self.sizes(x)))[self.log.step_start :].max())


class Programs:
    """Peak models over a range of sizes in which different programs run, each from some size on.

    Args:
        trace, few: as for :class:`PeakModel`, at sizes in units.
        points: units to sample the first program at.

    Raises:
        NotOneProgram: no two neighbouring sizes seem to run the same program.
    """

    def __init__(
        self,
        trace: Callable[[int], MemoryLog],
        points: Sequence[int],
        few: Callable[[int], MemoryLog] | None = None,
    ):
        self.trace, self.points, self.few = trace, points, few
        self.starts = [0]
        self.models = [PeakModel(trace, points, few)]

    def model(self, units: int) -> PeakModel:
        """The model of the program that runs at that size, as far as is known."""
        return self.models[bisect_right(self.starts, units) - 1]

    def confirm(self, units: int) -> bool:
        """Whether the program at that size is the one that :meth:`model` samples; if not, learn where the
        other one starts and sample it there.

        Raises:
            NotOneProgram: the other program's neighbouring sizes run yet others, or none below was sampled.
        """
        model = self.model(units)
        if model.same_program(units):
            return True
        smaller = [p for p in model.points if p < units]
        if not smaller:
            raise NotOneProgram(f"another program runs at {units}, below {model.points[0]}")
        below, above = max(smaller), units
        while above - below > 1:
            middle = (below + above) // 2
            if model.same_program(middle):
                below = middle
            else:
                above = middle
        learned = PeakModel(self.trace, [above + i for i in range(len(self.points))], self.few)
        at = bisect_right(self.starts, above)
        self.starts.insert(at, above)
        self.models.insert(at, learned)
        return False


class Needs:
    """What a cell needs of its card and of its host by size, from guessed traces of that size. They do not
    say what the allocator loses between blocks.

    Args:
        cell: of which sizes are asked; all of its ranks are taken to hold as much on hosts as the traced.
        trace: gives the trace of a size.
        capacity: bytes of the card that tensors can have.
    """

    def __init__(self, cell: Cell, trace: Callable[[int], Trace], capacity: int):
        self._cell, self._trace, self._capacity = cell, trace, capacity
        self.part = cache(self._part)

    def _part(self, size: int) -> float:
        """The need as a part of what there is, of the card or of the host, whichever is larger."""
        trace = self._trace(size)
        on_host = part_of_host(self._cell, host_peaks(trace.host_memory)[-1])
        return max(trace.memory.peak().nbytes / self._capacity, on_host)

    def last_that_fits(self, low: int, high: int, most: float = 1.0) -> int:
        """The last size from ``low`` on, and below ``high``, of which the need is no more than ``most``;
        ``low`` if there is none. Needs of cards grow nearly in a line with the size, which says where to
        look; those of hosts in steps, so every third look is in the middle."""
        needs = {0: 0.0}
        while high - low > 1:
            near = [max(n for n in needs if n <= low), *sorted(n for n in needs if n > low)[:1]]
            if len(near) == 1:
                near = sorted(needs)[-2:]
            if len(near) == 1 or len(needs) % 3 == 0:
                at = (low + high) // 2
            else:
                a, b = near
                slope = (needs[b] - needs[a]) / (b - a)
                at = a + int((most - needs[a]) / slope) if slope > 0 else high - 1
            at = max(low + 1, min(high - 1, at))
            needs[at] = self.part(at)
            if needs[at] <= most:
                low = at
            else:
                high = at
        return low
