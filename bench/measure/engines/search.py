"""A search on any engine: the largest value that fits, proved by a step at each value that was tried.

On virtual ranks the answer is predicted from a few guessed traces (:class:`Guesses`), then proved by whole
traces: the answer fits, one search step more does not. So a search costs two whole traces if the prediction
is right, one more if the allocator loses memory to fragmentation, and up to three more if the search step is
no multiple of the lengths that fused kernels take. The time of a step comes from the same traces.

The bytes that a cell needs on its card and its host at any size are guessed from traces of few layers. Within
one program, the size of each storage is a polynomial of degree 1 or 2 in the batch or the sequence length. So
two or three guessed traces (:func:`measure.engines.tracing.trace`) give the whole curve of live bytes at any
size, and its largest value is the peak. The peak alone must not be extrapolated, because the phase in which
the peak falls changes with the size.

If sizes run different programs (a longer sequence has more tiles), each size is traced itself.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import rank_memory, tracing, virtual
from spbench.bench.measure.engines.class_traces import ClassTraces
from spbench.bench.measure.engines.deepened_traces import Effort
from spbench.bench.measure.engines.engine import Candidates, Engine
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.engines.step_times import can_time
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.memory.allocator import replay
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measurement import Measurement
from spbench.impls import Unsupported


class Guesses:
    """The memory that a cell needs, by size: extrapolated if all sizes run one program, else traced.

    Args:
        cell: the searching cell; every rank is taken to hold as many bytes on its host as the traced rank.
        trace: returns the trace of a size, at an effort.
        points: the sizes to extrapolate from: one more than the degree of the polynomial.
        capacity: bytes of the card that tensors can have.

    Attributes:
        extrapolates: whether all sizes that were traced so far run one program.
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
        """Forget the guessed needs of all sizes except the sampled sizes."""
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
        """Whether a size runs the program of the sampled sizes; if not, each size is traced from now on."""
        if self.extrapolates and self._program(size) != self._program(self._smallest):
            self.extrapolates = False
            self._forget()
            return False
        return True

    def need(self, size: int) -> float:
        """The share of memory that a size needs, on the card or the host, the larger; above 1: no room."""
        return self._need(*self.memories(size))

    def _need(self, card: MemoryLog, host: MemoryLog) -> float:
        on_card = np.cumsum(card.signed_bytes())[card.step_start :].max() / self._capacity
        return max(on_card, rank_memory.part_of_host(self._cell, rank_memory.host_peaks(host)[-1]))

    def served(self, size: int) -> bool:
        """Whether the card's caching allocator has room for all requests of the step at a size."""
        if size not in self._served:
            log, kind = self.memories(size)[0], rank_memory.allocator_of(self._cell)
            replayed = replay(log.sizes, log.events, self._capacity, (), log.streams, kind)
            self._served[size] = replayed.out_of_memory is None
        return self._served[size]

    def last_that_fits(self, low: int, high: int) -> int:
        """The largest size from ``low`` to below ``high`` whose :meth:`need` is at most 1; ``low`` if there
        is none. The need of a card is nearly linear in the size, which says where to look next. The need of
        a host grows in steps, so every third look is at the geometric mean of the bounds."""
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


#: whole traces that a search may take before it is given up as a failure
MAX_PROBES = 40
#: fused attention kernels take only multiples of this; other lengths run other kernels, with more memory
KERNEL_MULTIPLE = 4


class Probe(NamedTuple):
    """A whole trace of the step at one value of the searched quantity."""

    value: int
    traces: ClassTraces
    measurement: Measurement


def proof_of(value: int, measurement: Measurement) -> dict[str, Any]:
    """An entry of :attr:`Measurement.proof`: the status, memory and reason at one value of the quantity."""
    shown = ("status", "peak_memory_bytes", "reserved_memory_bytes", "reason")
    return {"value": value, **{name: getattr(measurement, name) for name in shown}}


class Boundary:
    """The bracket around the largest value that fits, and the probes that narrowed it.

    Bounds are counted in units: the search's step, or its smallest multiple that all kernels take, so that
    memory grows from each unit to the next. :meth:`refine` tries the values between two units last.

    Args:
        candidates: the values that may be tried.
        capacity: bytes of the card that tensors can have.
    """

    def __init__(self, candidates: Candidates, capacity: int):
        self.candidates, self.capacity = candidates, capacity
        asked, step = candidates.asked, candidates.values.step
        self.unit = step * (KERNEL_MULTIPLE // math.gcd(KERNEL_MULTIPLE, asked.step))
        self.low, self.high = 0, asked.limit // self.unit + 1
        self.timed = asked.timed and can_time(candidates.cell)
        #: the newest probe, and the best that fits
        self.newest: Probe | None = None
        self.best: Probe | None = None
        self.proof: list[dict[str, Any]] = []
        #: the rank class whose memory is predicted; mostly the first stage's, which runs furthest ahead
        self.predicted = 0
        #: the number of sizes that were predicted to fit and were out of memory
        self.disappointed = 0
        self._sample()

    def _sample(self) -> None:
        """Learn how the memory of the predicted class grows, from guessed traces of small sizes."""
        cell, quantity = self.candidates.cell, self.candidates.quantity
        smallest = quantity.smallest_sample(self.unit)
        points = [smallest * n for n in range(1, quantity.degree + 2)]
        self.guesses = Guesses(cell, self._trace_at, points, self.capacity)

    def _trace_at(self, units: int, effort: Effort) -> Trace:
        cell = self.candidates.at(units * self.unit)
        return tracing.trace(cell, rank_classes(cell)[self.predicted].first, effort=effort)

    def _guess(self) -> int:
        """The last unit inside the bracket that seems to fit; its lower end if none does.

        The allocator's losses are counted after the first whole trace. Each failed prediction keeps the next
        guess further below the upper end of the bracket."""
        while True:
            guess = self.guesses.last_that_fits(self.low, self.high)
            if self.newest is not None:
                count = guess - self.low
                guess = self.low + largest_fitting(count, lambda n: self.guesses.served(self.low + n), count)
            if guess == self.low or self.guesses.confirm(guess):
                return min(guess, max(self.low + 1, self.high - 2**self.disappointed // 4))

    def probe(self, value: int) -> bool:
        """Trace the whole step at a value of the searched quantity; returns whether the step fits."""
        traces = virtual.trace_classes(self.candidates.at(value), events=self.timed)
        self.newest = probe = Probe(value, traces, traces.memory_measurement())
        self.proof.append(proof_of(value, probe.measurement))
        fits = probe.measurement.status != "oom"
        if fits:
            self.best = probe
        largest = traces.traces.index(traces.worst())
        if largest != self.predicted:
            self.predicted = largest
            self._sample()
        return fits

    def narrow(self) -> None:
        """Probe until no unit lies between the bounds of the bracket."""
        beyond = 1  # units above the lower bound to probe, when no larger size is predicted to fit
        while self.high - self.low > 1:
            if len(self.proof) == MAX_PROBES:
                raise RuntimeError(
                    f"no boundary after {MAX_PROBES} traces between {self.low} and {self.high}"
                )
            guess = self._guess()
            predicted = guess > self.low
            units = min(guess if predicted else self.low + beyond, self.high - 1)
            fits = self.probe(units * self.unit)
            self.disappointed += predicted and not fits
            self.low, self.high = (units, self.high) if fits else (self.low, units)
            beyond = 2 * beyond if fits and not predicted else 1

    def refine(self) -> None:
        """Probe the values inside the bracket that are no whole units, the largest first, until one fits."""
        inside = [value for value in self.candidates.values if self.low < value / self.unit < self.high]
        next((value for value in reversed(inside) if self.probe(value)), None)


def largest_that_fits(cell: Cell) -> Measurement:
    """The answer of :func:`search` on virtual ranks; a cluster without a memory limit is Unsupported."""
    candidates = Candidates(cell)
    capacity = rank_memory.usable_memory_bytes(cell.at(candidates.values[0]))
    if capacity is None:
        raise Unsupported(f"cluster {cell.cluster} has no memory limit", "name one that has")
    boundary = Boundary(candidates, capacity)
    boundary.narrow()
    boundary.refine()
    chosen = boundary.best or boundary.newest
    assert chosen is not None
    measurement = chosen.traces.measurement() if boundary.best else chosen.measurement
    measurement.proof = boundary.proof
    measurement.answer = boundary.best.value if boundary.best else None
    return measurement


def search(cell: Cell, engine: Engine) -> Measurement:
    """The measurement at the largest value that fits, with ``answer`` and ``proof``; status oom if not even
    the smallest value fits.

    Virtual ranks predict the answer from small traces. Any other engine tries the virtual answer first, on
    the cell's rank, or else on the virtual rank with the largest peak.

    Raises:
        Unsupported: the engine does not search, the strategy cannot run these sizes, the limit is below the
            smallest value, or the cluster's memory has no limit.
    """
    if isinstance(engine, virtual.VirtualEngine):
        return largest_that_fits(cell)
    tried: dict[int, Measurement] = {}
    with engine.probes(cell) as probe:
        virtually, candidates = largest_that_fits(cell), Candidates(cell)
        rank = virtually.peak_rank if cell.rank is None else cell.rank

        def at(value: int) -> Cell:
            return candidates.at(value).model_copy(update={"rank": rank})

        def fits(number: int) -> bool:
            value = candidates.values[number - 1]
            tried[value] = probe(at(value))
            return tried[value].status != "oom"

        guess = candidates.values.index(virtually.answer) + 1 if virtually.answer else 1
        best = largest_fitting(len(candidates.values), fits, guess)
    answer = candidates.values[best - 1] if best else None
    measurement = tried[answer or candidates.values[0]]
    if answer and candidates.asked.timed:
        measurement = engine.measure(at(answer))
    measurement.answer = answer
    measurement.proof = [proof_of(value, measured) for value, measured in tried.items()]
    return measurement


def largest_fitting(count: int, fits: Callable[[int], bool], guess: int) -> int:
    """The largest of 1, ..., ``count`` for which ``fits`` is true; 0 if there is none.

    Each number below a number that fits must fit too. The guess is tried first, then numbers at distances
    that double from there until ``fits`` changes, then the middle of the remaining range. A right guess costs
    two calls.
    """
    low, high, step = 0, count + 1, 1  # low fits, high does not
    tried_low = tried_high = False
    at = min(max(guess, 1), count)
    while high - low > 1:
        if fits(at):
            low, tried_low = at, True
        else:
            high, tried_high = at, True
        if tried_low and tried_high:
            at = (low + high) // 2
        else:
            at = min(low + step, count) if tried_low else max(high - step, 1)
            step *= 2
    return low
