"""Searches: the largest batch or sequence length that fits, with proof.

The boundary is predicted from a few small traces (:mod:`bench.search.extrapolate`), then proved by whole
traces: the answer fits, one step more does not. So a search costs two whole traces where the prediction
is right, one more where the allocator loses memory to fragmentation, and up to three more where the step
is no multiple of what fused kernels take. The time of a step comes from the same traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from spbench.bench.cell import Cell, Measurement
from spbench.bench.config.cluster import load_cluster
from spbench.bench.engines import virtual
from spbench.bench.engines.setup import alike_ranks, planned_strategy
from spbench.bench.engines.timing import add_times, can_time
from spbench.bench.meters.allocator import replay
from spbench.bench.meters.event_log import TimelineMeter
from spbench.bench.meters.memory import MemoryLog
from spbench.bench.search.extrapolate import NotOneProgram, Programs
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Unsupported

#: whole traces that a search may take before it is given up as a failure
MAX_PROBES = 40
#: sequences shorter than this are not used to predict longer ones: kernels treat tiny shapes apart
SHORTEST_SAMPLE = 128
#: fused kernels of attention take multiples of this only; other sizes run other kernels and need more memory
KERNEL_MULTIPLE = 4


class _Boundary:
    """The bracket around the largest size that fits, and the probes that narrowed it.

    Sizes are counted in units here: of the search's step, or of the smallest multiple of it that all kernels
    take, among which memory only grows. The sizes between two of those are tried last, by :meth:`refine`.
    """

    def __init__(self, cell: Cell, capacity: int):
        assert cell.search is not None
        self.cell, self.capacity = cell, capacity
        self.by_length = cell.search.quantity == "seq_len"
        micro_batches = cell.sizes.dp * cell.training.micro_batches
        parts = planned_strategy(cell).sequence_parts if self.by_length else micro_batches
        self.fine_step = cell.search.step * parts
        self.step = self.fine_step * (KERNEL_MULTIPLE // math.gcd(KERNEL_MULTIPLE, cell.search.step))
        self.low, self.high = 0, cell.search.limit // self.step + 1
        self.answer: int | None = None
        self.best: Measurement | None = None
        self.worst: Measurement | None = None
        self.proof: list[dict[str, Any]] = []
        self.timed = cell.search.timed and can_time(cell)
        #: of the stages at the answer, where the search is timed
        self.timelines: list[TimelineMeter] = []
        #: the newest whole trace, and the units at which it was
        self.whole: tuple[int, MemoryLog] | None = None
        #: whether to look which program runs at a guess
        self.confirming = True
        #: the set of ranks whose memory is predicted; mostly the first stage's, which runs furthest ahead
        self.set = 0
        self._sample()

    def _sample(self) -> None:
        """Learn how the memory of those ranks grows, from small shallow traces."""
        cell = self.cell
        # memory is affine in the batch and quadratic in the length: two points for one, three for the other
        shortest = -(-SHORTEST_SAMPLE // self.step)
        points = [shortest, 2 * shortest, 3 * shortest] if self.by_length else [1, 2]
        layers = getattr(model_preset(cell.model, cell.model_options), "layers", None)
        if layers is not None:
            layers //= cell.sizes.pp
        try:
            self.programs: Programs | None = Programs(self._traced, points, layers)
        except NotOneProgram:
            self.programs = None

    def _traced(self, units: int, layers: int | None) -> MemoryLog:
        cell = self.cell.at(units * self.step)
        if layers is not None:
            whole = layers * cell.sizes.pp
            cell = cell.model_copy(update={"model_options": {**cell.model_options, "layers": whole}})
        return virtual.trace(cell, alike_ranks(cell)[self.set].ranks[0]).memory.log

    def _last(self, fits: Callable[[int], bool]) -> int:
        """The last unit inside the bracket that fits, by bisection; its lower end if none does."""
        low, high = self.low, self.high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _guess(self) -> int:
        """The boundary as far as is known; blind bisection if no program could be sampled."""
        if self.programs is None:
            return (self.low + self.high) // 2
        while True:
            guess = self._last(self._seems_to_fit)
            if guess == self.low or not self.confirming:
                return guess
            try:
                if self.programs.confirm(guess):
                    return guess
            except NotOneProgram:
                # programs change too often there: what is known of others must do, and the probes will tell
                self.confirming = False

    def _seems_to_fit(self, units: int) -> bool:
        """Whether the allocator serves the events of the newest whole trace, resized; if that is of another
        program, or there is none yet, whether the predicted peak is below the card's memory."""
        assert self.programs is not None
        model = self.programs.model(units)
        if self.whole is not None:
            at, log = self.whole
            if self.programs.model(at) is model:
                sizes = model.resized(log, at, units)
                return replay(sizes, log.events, self.capacity).out_of_memory is None
        return model(units) <= self.capacity

    def probe(self, value: int) -> bool:
        """Trace the whole step at that batch or length; tells whether it fits."""
        cell = self.cell.at(value)
        first_ranks = [alike.ranks[0] for alike in alike_ranks(cell)]
        recorders = [virtual.trace(cell, rank, timeline=self.timed) for rank in first_ranks]
        result = virtual.told(cell, [virtual.measure(cell, r, which) for which, r in enumerate(recorders)])
        fits = result.status == "ok"
        self.proof.append(
            {
                "value": value,
                "status": result.status,
                "peak_memory_bytes": result.peak_memory_bytes,
                "reserved_memory_bytes": result.reserved_memory_bytes,
                "reason": result.reason,
            }
        )
        if fits:
            self.answer, self.best = value, result
            self.timelines = [r.timeline for r in recorders if r.timeline is not None]
        else:
            self.worst = result
        which = first_ranks.index(result.peak_rank)
        if which != self.set:
            self.set = which
            self._sample()
        self.whole = value // self.step, recorders[which].memory.log
        return fits

    def narrow(self) -> None:
        """Probe until the bracket has no room."""
        beyond = 1  # how far past a size that fits to look, when nothing more is predicted to fit
        while self.high - self.low > 1:
            if len(self.proof) == MAX_PROBES:
                raise RuntimeError(
                    f"no boundary after {MAX_PROBES} traces between {self.low} and {self.high}"
                )
            guess = self._guess()
            predicted = guess > self.low
            units = min(guess if predicted else self.low + beyond, self.high - 1)
            fits = self.probe(units * self.step)
            self.low, self.high = (units, self.high) if fits else (self.low, units)
            beyond = 2 * beyond if fits and not predicted else 1

    def refine(self) -> None:
        """Probe the sizes inside the bracket that are not whole units, the largest first."""
        assert self.cell.search is not None
        end = min(self.high * self.step, self.cell.search.limit + 1)
        inside = range(self.low * self.step + self.fine_step, end, self.fine_step)
        next((value for value in reversed(inside) if self.probe(value)), None)


def largest_that_fits(cell: Cell) -> Measurement:
    """Answer a cell's search on the virtual engine.

    Returns the measurement at the answer, with ``answer`` and ``proof`` set; status oom, if not even the
    smallest size fits.

    Raises:
        Unsupported: the strategy cannot run these sizes, or the cluster's memory has no limit.
    """
    capacity = load_cluster(cell.cluster).usable_memory_bytes
    if cell.engine != "virtual":
        raise Unsupported(f"searches do not run on the engine {cell.engine}", "use the virtual one")
    if capacity is None:
        raise Unsupported(f"cluster {cell.cluster} has no memory limit", "name one that has")
    boundary = _Boundary(cell, capacity)
    assert cell.search is not None
    if cell.search.limit < boundary.fine_step:
        raise Unsupported(
            f"{cell.search.quantity} is searched in steps of {boundary.fine_step}, above the limit "
            f"{cell.search.limit}",
            "raise the limit",
        )
    boundary.narrow()
    boundary.refine()
    found = boundary.best or boundary.worst
    assert found is not None
    if boundary.timelines and boundary.answer is not None:
        programs = [timeline.program() for timeline in boundary.timelines]
        members = [alike.ranks for alike in alike_ranks(cell)]
        add_times(found, cell.at(boundary.answer), programs, members)
    found.proof = boundary.proof
    found.answer = boundary.answer
    return found
