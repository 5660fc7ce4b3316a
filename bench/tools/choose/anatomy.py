"""The anatomy of a rank's memory: bytes at its peak by kind and module, its curve over time, and the smallest
card on which it fits. Workers run :func:`examine` for a cell, and :func:`attempt` for a changed cell."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from pydantic.dataclasses import dataclass

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.measurement import Measurement
from spbench.bench.units import GIB

#: under this name the meters of a measurement have an :class:`Anatomy` as plain data, or only its
#: ``least_usable_bytes``
ANATOMY = "fit"
#: points of the memory curve, each the largest moment of a run of allocator events
_POINTS = 600
#: parts of the peak, by kind and module, that have a line each; all smaller ones share one
_MOST_PARTS = 12
#: a changed cell is not traced whole if its guessed peak is more than this many times the card's memory
_PLAINLY_TOO_MUCH = 1.1
#: the tolerance of the smallest card's bytes, relative to these, if that is more than a segment
_NEAR = 1e-3


@dataclass(frozen=True)
class Moment:
    """When a rank's memory is largest.

    Attributes:
        step: number of the step from 1; 0: set-up.
        phase: phase of the step, such as "forward"; "set-up" before the first step.
        micro_batch, micro_batches: which of the step's phases of that name, from 1, and of how many.
        module: the module whose tensor is allocated, with ``*`` for numbers of layers; "": none.
    """

    step: int
    phase: str
    micro_batch: int
    micro_batches: int
    module: str

    def __str__(self) -> str:
        words = f"step {self.step}, {self.phase}" if self.step else self.phase
        if self.micro_batches > 1:
            words += f" {self.micro_batch} of {self.micro_batches}"
        return words + (f", in {self.module}" if self.module else "")


@dataclass(frozen=True)
class Part:
    """A part of the peak: tensors of one kind made in one module; the kind "" has all smaller parts."""

    kind: str
    module: str
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Anatomy:
    """The memory of a rank at its largest moment, set-up included.

    Attributes:
        ranks: the ranks of the class, which run the same program.
        stage: index of the pipeline stage; None: the pipeline has one stage.
        peak_memory_bytes: bytes of all allocated blocks at that moment.
        reserved_memory_bytes: the most that the allocator reserves, on a card without a limit.
        least_usable_bytes: the smallest card on which the rank fits; see :func:`least_usable`.
        held: allocated bytes by kind of tensor at that moment, largest first, without zeros.
        parts: the same bytes by kind and module, largest first; the last part has the rest.
        curve: the ``event`` and, by kind, the bytes at the largest moment of each of equal runs of events.
        phases: (name, event at its start); phases of one name in a row are one.
        events: how many allocations and frees the log has.
    """

    ranks: Sequence[int]
    stage: int | None
    moment: Moment
    peak_memory_bytes: int
    reserved_memory_bytes: int
    least_usable_bytes: int
    held: Mapping[str, int]
    parts: Sequence[Part]
    curve: Mapping[str, Sequence[int]]
    phases: Sequence[tuple[str, int]]
    events: int


def anatomy(
    log: measure.MemoryLog,
    kind: type[measure.CachingAllocator] = measure.CachingAllocator,
    least: int | None = None,
    ranks: Sequence[int] = (0,),
    stage: int | None = None,
) -> Anatomy:
    """Take the memory log of a rank apart.

    Args:
        kind: the class of the allocator.
        least: the result of :func:`least_usable`; None: not worked out yet.
        ranks, stage: see :class:`Anatomy`.
    """
    served = measure.replay(log.sizes, log.events, None, (), log.streams, kind)
    blocks, events = np.asarray(served.blocks, dtype=np.int64), np.asarray(log.events, dtype=np.int64)
    signed = np.sign(events) * blocks[np.abs(events) - 1]
    live = np.cumsum(signed)
    at = int(np.argmax(live))
    kinds = _kinds(log, events)
    alive = log.alive_after(at)
    held = {name: int(blocks[alive & (kinds == number)].sum()) for number, name in enumerate(log.CATEGORIES)}
    return Anatomy(
        ranks=[*ranks],
        stage=stage,
        moment=_moment(log, at),
        peak_memory_bytes=int(live[at]),
        reserved_memory_bytes=served.peak_reserved,
        least_usable_bytes=least or least_usable(log, int(live[at]), served.peak_reserved, kind),
        held=dict(sorted(((k, n) for k, n in held.items() if n), key=lambda item: -item[1])),
        parts=_parts(log, at, blocks, kinds),
        curve=_curve(live, signed, kinds[np.abs(events) - 1]),
        phases=[next(run) for _, run in groupby([("set-up", 0), *log.marks], itemgetter(0))],
        events=len(events),
    )


def _kinds(log: measure.MemoryLog, events: np.ndarray) -> np.ndarray:
    """[storages]: each storage's index in CATEGORIES. Temporaries that backward makes and that are still
    alive in the optimizer count as gradients, because some backends hold none between steps."""
    kinds = np.asarray([log.CATEGORIES.index(name) for name in log.categories()])
    born: set[int] = set()
    for name, span in log.spans():
        if name == "backward":
            inside = events[span]
            born |= {*(inside[inside > 0] - 1).tolist()}
            born -= {*(-inside[inside < 0] - 1).tolist()}
        elif name != "optimizer":
            born -= {*(-events[span][events[span] < 0] - 1).tolist()}
        else:
            held = np.asarray([*born], dtype=np.int64)
            kinds[held[kinds[held] == log.CATEGORIES.index("temporaries")]] = log.CATEGORIES.index(
                "gradients"
            )
            born.clear()
    return kinds


def _moment(log: measure.MemoryLog, at: int) -> Moment:
    step, phase = log.step_of(at), log.phase_of(at)
    ends = [log.step_start, *log.step_ends]
    begins = [
        first for name, first in log.marks if step and name == phase and ends[step - 1] <= first < ends[step]
    ]
    number = abs(log.events[at]) - 1 if log.events else 0
    module = log.place_names[log.places[number]] if log.places else ""
    return Moment(step, phase, sum(first <= at for first in begins), len(begins), module)


def _parts(log: measure.MemoryLog, at: int, blocks: np.ndarray, kinds: np.ndarray) -> list[Part]:
    every = log.parts_after(at, blocks, kinds)
    parts = [Part(log.CATEGORIES[n], place, *sums) for n, place, *sums in every[:_MOST_PARTS]]
    if rest := every[_MOST_PARTS:]:
        parts.append(Part("", "", sum(each[2] for each in rest), sum(each[3] for each in rest)))
    return parts


def _curve(live: np.ndarray, signed: np.ndarray, kinds: np.ndarray) -> dict[str, list[int]]:
    bounds = np.unique(np.linspace(0, len(live), _POINTS + 1).astype(int))
    at = [int(a + np.argmax(live[a:b])) for a, b in pairwise(bounds)]
    curve = {"event": at}
    for kind, name in enumerate(measure.MemoryLog.CATEGORIES):
        of_kind = np.cumsum(np.where(kinds == kind, signed, 0))[at]
        if of_kind.any():
            curve[name] = of_kind.tolist()
    return curve


def peaks_by_phase(anatomy: Anatomy) -> dict[tuple[int, str], int]:
    """The most bytes in each phase, by (how many phases of its name came before, name); from the curve, whose
    points are the largest moments of their runs of events."""
    kinds = [values for name, values in anatomy.curve.items() if name != "event"]
    totals = np.sum(np.array(kinds), axis=0)
    names, starts = zip(*anatomy.phases, strict=True)
    places = np.maximum(0, np.searchsorted(starts, anatomy.curve["event"], side="right") - 1)
    return {
        (names[:place].count(names[place]), names[place]): int(totals[places == place].max(initial=0))
        for place in dict.fromkeys(places.tolist())
    }


def least_usable(
    log: measure.MemoryLog,
    low: int,
    high: int,
    kind: type[measure.CachingAllocator] = measure.CachingAllocator,
    usable: int | None = None,
) -> int:
    """Usable bytes of the smallest card on which the allocator serves a log, to 2 MiB or 0.1%. Fragmentation,
    free blocks too small for a request, can make these more than the peak of allocated bytes.

    A larger card does not always serve what a smaller one does: if room is short, the allocator returns
    cached blocks, so that later requests meet other gaps. So the answer agrees with the card that ``usable``
    describes: at most ``usable`` if that card serves the log, and more if not.

    Args:
        low: the peak of allocated bytes; a card with less cannot serve the log.
        high: bytes of a card that serves the log.
        kind: the class of the allocator of the card.
        usable: usable bytes of the user's card; None: no card is given.
    """
    if usable is not None and low <= usable < high:
        low, high = (low, usable) if _serves(log, usable, kind) else (usable, high)
    while high - low > max(measure.CachingAllocator.segment_granule, _NEAR * low):
        middle = (low + high) // 2
        low, high = (low, middle) if _serves(log, middle, kind) else (middle, high)
    return high


def _serves(log: measure.MemoryLog, nbytes: int, kind: type[measure.CachingAllocator]) -> bool:
    """Whether the allocator serves a log on a card of ``nbytes`` usable bytes."""
    return measure.replay(log.sizes, log.events, nbytes, (), log.streams, kind).out_of_memory is None


class Fullest(NamedTuple):
    """The class of ranks that needs the largest card: its place among the classes, and that card's usable
    bytes."""

    place: int
    usable_bytes: int


def fullest(traces: measure.ClassTraces) -> Fullest:
    """The class of ranks that needs the largest card. If some classes do not fit the cell's own card, the
    result is one of these and needs more than the card has; else it needs at most what the card has."""
    kind, usable = measure.allocator_of(traces.cell), measure.usable_memory_bytes(traces.cell)
    oom = [each.status == "oom" for each in traces.by_class]
    candidates = [at for at in range(len(oom)) if oom[at] or not any(oom)]

    def most(at: int, name: str) -> int:
        return max(int(entry[name]) for entry in traces.by_class[at].by_class)

    largest = Fullest(0, 0)
    for at in sorted(candidates, key=lambda at: -most(at, "peak_memory_bytes")):
        low, high = most(at, "peak_memory_bytes"), most(at, "reserved_memory_bytes")
        log, so_far = traces.traces[at].memory, largest.usable_bytes
        # no class needs more than it reserves on a card without a limit, or than a card that serves it
        if high > so_far and not (low <= so_far and _serves(log, so_far, kind)):
            needed = least_usable(log, low, high, kind, usable)
            largest = max(largest, Fullest(at, needed), key=lambda each: each.usable_bytes)
    return largest


# -- run by workers -----------------------------------------------------------------------------------------


def examine(cell: Cell) -> Measurement:
    """Measure a cell, with its step time even if it does not fit; ``meters`` have the :class:`Anatomy` of the
    class of ranks that needs the largest card.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    short = measure.ShortSteps()
    measurement, traces = measure.measured(cell, short, also_too_large=True)
    at, least = fullest(traces)
    ranks, log = traces.classes[at], traces.traces[at].memory
    if traces.of_all is not None:  # the log has fewer micro-batches
        log = measure.stage_traces(cell, [ranks], events=False, short=short)[0].memory
    stage = ranks.stage.index if ranks.stage.count > 1 else None
    taken_apart = anatomy(log, measure.allocator_of(cell), least, ranks.ranks, stage)
    measurement.meters = {**measurement.meters, ANATOMY: asdict(taken_apart)}
    return measurement


def trace_stage(cell: Cell, stage: int) -> Measurement:
    """Trace the first rank of a stage; the trace is kept on disk, for :func:`examine` of the cell."""
    ranks = next(each for each in measure.rank_classes(cell) if each.stage.index == stage)
    measure.trace_of_class(cell, ranks, events=measure.can_time(cell))
    return Measurement()


def attempt(cell: Cell) -> Measurement:
    """Search if the cell asks for a search, else :func:`examine` it. If the guessed peak of the first class
    of ranks exceeds the card by 10%, returns the status oom with that peak, and traces no more."""
    if cell.search is not None:
        return measure.run_cell(cell)
    usable = measure.usable_memory_bytes(cell)
    if usable is not None:
        # where no guess can be put together, this is the whole trace, which is kept on disk for `examine`
        guess = measure.trace_of_class(
            cell, measure.rank_classes(cell)[0], events=measure.can_time(cell), effort="guess"
        )
        peak = guess.memory.peak().nbytes
        if peak > _PLAINLY_TOO_MUCH * usable:
            reason = f"needs about {peak / GIB:.0f} GiB"
            return Measurement(
                status="oom", reason=reason, peak_memory_bytes=peak, usable_memory_bytes=usable
            )
    return examine(cell)
