"""Predict the peak memory of a cell at any size and depth from a few small traces.

Within one program, the size of each storage is a polynomial of degree two in the batch or the sequence
length, and a model of n equal layers differs from one of n - 1 by the events of one layer more. So a few
traces (two or three sizes; two and three layers) give the whole curve of live bytes of the full model at
any size, and its peak is the largest over all phases, whichever it is. The overall peak alone must not be
extrapolated: which phase it falls in changes with size and depth.

Where each size runs a program of its own (a longer sequence has more tiles), no other size says what one
needs; :class:`ShallowNeeds` traces few layers at the very size, at a fifth of what a whole trace costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.rank_memory import host_peaks, part_of_host
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.trace.memory_log import MemoryLog

#: the depths that are traced, in layers a pipeline stage; each phase of a step is then mostly layers
DEPTHS = (2, 3)


class NotOneProgram(ValueError):
    """The traces are not of one program, so that their storages do not correspond."""


class _Polynomial:
    """The sizes of a program's storages, each as a polynomial through its samples."""

    def __init__(self, points: Sequence[int], logs: Sequence[MemoryLog]):
        first = logs[0]
        if any(log.events != first.events for log in logs):
            raise NotOneProgram(
                f"the order of allocations differs between sizes {', '.join(map(str, points))}"
            )
        self.log, self.points = first, points
        self.samples = [np.asarray(log.sizes, dtype=np.float64) for log in logs]

    def sizes(self, x: int) -> np.ndarray:
        """Bytes of each storage at size x, by Lagrange's formula."""
        sizes = np.zeros_like(self.samples[0])
        for i, (xi, sample) in enumerate(zip(self.points, self.samples, strict=True)):
            others = [xj for j, xj in enumerate(self.points) if j != i]
            sizes += sample * np.prod([(x - xj) / (xi - xj) for xj in others])
        return np.rint(sizes).astype(np.int64)

    def live(self, x: int) -> np.ndarray:
        """Live bytes after each event, at size x."""
        return np.cumsum(self.log.signed_bytes(self.sizes(x)))


class PeakModel:
    """Peak allocated bytes of the step at any size.

    Args:
        trace: gives the memory log at (size, layers).
        points: sizes within one program; as many as the degree of its sizes plus one.
        layers: depth of the full model's stage; None if the model has no depth to reduce.

    Raises:
        NotOneProgram: the points do not lie within one program.
    """

    def __init__(
        self, trace: Callable[[int, int | None], MemoryLog], points: Sequence[int], layers: int | None
    ):
        self.layers, self.points = layers, points
        self.depths: tuple[int | None, ...] = (
            DEPTHS if layers is not None and layers > max(DEPTHS) else (layers,)
        )
        self.curves = [_Polynomial(points, [trace(x, depth) for x in points]) for depth in self.depths]

    def resized(self, log: MemoryLog, x: int, to: int) -> list[int]:
        """The storages of a whole trace at size x as they would be at another size.

        A storage of the full model has the bytes of some storage of the shallow one, made likewise before
        the step or in it, and grows with that. One that has no such likeness (a buffer for all layers) does
        not depend on the size.
        """
        grown: dict[tuple[bool, int], int] = {}
        for curve in self.curves:
            set_up = curve.log.born_before_step()
            grown.update(
                zip(zip(set_up, curve.sizes(x).tolist(), strict=True), curve.sizes(to).tolist(), strict=True)
            )
        return [grown.get(kind, kind[1]) for kind in zip(log.born_before_step(), log.sizes, strict=True)]

    def same_program(self, log: MemoryLog) -> bool:
        """Whether a trace of the shallowest model is of the program that was sampled."""
        return log.events == self.curves[0].log.events

    def __call__(self, x: int) -> int:
        """Peak allocated bytes of the full model at size x."""
        changes = [curve.log.signed_bytes(curve.sizes(x)) for curve in self.curves]
        lives = [np.cumsum(each) for each in changes]
        shallow = self.curves[0].log
        if len(self.curves) == 1:
            return int(lives[0][shallow.step_start :].max())
        assert self.layers is not None
        peaks = []
        for spans in zip(*(curve.log.spans() for curve in self.curves), strict=True):
            where = [span for _, span in spans]
            here, deeper = (live[span] for live, span in zip(lives, where, strict=True))
            born, born_deeper = (change[span] > 0 for change, span in zip(changes, where, strict=True))
            # a deeper model has the same first layers as seen from the start of a phase, and the same last
            # ones as seen from its end; what lies between are equal layers, and linear in depth
            front, back = self._alike(x, where)
            for a, b in (
                (slice(front), slice(front)),
                (slice(len(here) - back, None), slice(len(deeper) - back, None)),
            ):
                # a peak is where something is born; what dies, dies at other events in a deeper model
                if (rises := born[a] & born_deeper[b]).any():
                    low, high = here[a][rises], deeper[b][rises]
                    peaks.append((low + (self.layers - DEPTHS[0]) * (high - low)).max())
        return int(max(peaks))

    def _alike(self, x: int, where: Sequence[slice]) -> tuple[int, int]:
        """How many events of a phase, from its start and from its end, are of the same bytes in both depths;
        at least half of the phase each, for buffers of all layers differ in size alone."""
        here, deeper = (
            curve.log.signed_bytes(curve.sizes(x))[span]
            for curve, span in zip(self.curves, where, strict=True)
        )
        # in a deeper model fewer may be born in a phase: a bucket of gradients that holds more layers
        n = min(len(here), len(deeper))
        half = n // 2
        front = np.flatnonzero(here[:n] != deeper[:n])
        back = np.flatnonzero(here[len(here) - n :] != deeper[len(deeper) - n :])
        return (
            max(half, int(front[0]) if len(front) else n),
            max(n - half, n - 1 - int(back[-1]) if len(back) else n),
        )


class Programs:
    """Peak models over a range of sizes in which different programs run, each from some size on.

    Args:
        trace: as for :class:`PeakModel`, at (size in units, layers).
        points: units to sample the first program at.
        layers: as for :class:`PeakModel`.

    Raises:
        NotOneProgram: no two neighbouring sizes seem to run the same program.
    """

    def __init__(
        self, trace: Callable[[int, int | None], MemoryLog], points: Sequence[int], layers: int | None
    ):
        self.trace, self.points, self.layers = trace, points, layers
        self.starts = [0]
        self.models = [PeakModel(trace, points, layers)]

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
        if model.same_program(self._shallow(units)):
            return True
        smaller = [p for p in model.points if p < units]
        if not smaller:
            raise NotOneProgram(f"another program runs at {units}, below {model.points[0]}")
        below, above = max(smaller), units
        while above - below > 1:
            middle = (below + above) // 2
            if model.same_program(self._shallow(middle)):
                below = middle
            else:
                above = middle
        learned = PeakModel(self.trace, [above + i for i in range(len(self.points))], self.layers)
        at = bisect_right(self.starts, above)
        self.starts.insert(at, above)
        self.models.insert(at, learned)
        return False

    def _shallow(self, units: int) -> MemoryLog:
        return self.trace(units, self.models[0].depths[0])


class ShallowNeeds:
    """What a cell needs of its card and of its host by size, from traces of few layers at that size. They do
    not say what the allocator loses between blocks.

    Args:
        cell: of which sizes are asked; all of its ranks are taken to hold as much on hosts as the traced.
        trace: gives the trace of (size, layers).
        layers: as for :class:`PeakModel`.
        capacity: bytes of the card that tensors can have.
    """

    def __init__(
        self, cell: Cell, trace: Callable[[int, int | None], Trace], layers: int | None, capacity: int
    ):
        self._cell, self._trace, self._layers, self._capacity = cell, cache(trace), layers, capacity
        self.part = cache(self._part)

    def _part(self, size: int) -> float:
        """The need as a part of what there is, of the card or of the host, whichever is larger."""
        model = PeakModel(lambda x, depth: self._trace(x, depth).memory, [size], self._layers)
        low, *deeper = (host_peaks(self._trace(size, depth).host_memory)[-1] for depth in model.depths)
        growth = sum(high - low for high in deeper)
        on_host = low + growth * ((self._layers or 0) - DEPTHS[0])
        return max(model(size) / self._capacity, part_of_host(self._cell, on_host))

    def last_that_fits(self, low: int, high: int, most: float = 1.0) -> int:
        """The last size from ``low`` on, and below ``high``, of which the need is no more than ``most``;
        ``low`` if there is none. Needs of cards grow nearly in a line with the size, which says where to
        look; those of hosts in steps, so every third look is in the middle."""
        known = {0: 0.0}
        while high - low > 1:
            near = [max(n for n in known if n <= low), *sorted(n for n in known if n > low)[:1]]
            if len(near) == 1:
                near = sorted(known)[-2:]
            if len(near) == 1 or len(known) % 3 == 0:
                at = (low + high) // 2
            else:
                a, b = near
                slope = (known[b] - known[a]) / (b - a)
                at = a + int((most - known[a]) / slope) if slope > 0 else high - 1
            at = max(low + 1, min(high - 1, at))
            known[at] = self.part(at)
            if known[at] <= most:
                low = at
            else:
                high = at
        return low
