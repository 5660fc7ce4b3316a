"""The anatomy of a rank's memory: bytes at its peak by kind and module, its curve over time, and the smallest
card on which it fits. Also a rank's memory as a snapshot like those of ``torch.cuda.memory._dump_snapshot``,
for PyTorch's viewer (https://pytorch.org/memory_viz) and for ``torch.cuda._memory_viz``."""

import pickle
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic.dataclasses import dataclass

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.files import write_whole

#: under this name the meters of a measurement have an :class:`Anatomy` as plain data, or only its
#: ``least_usable_bytes``
ANATOMY = "fit"
#: points of the memory curve, each the largest moment of a run of allocator events
_POINTS = 600
#: parts of the peak, by kind and module, that have a line each; all smaller ones share one
_MOST_PARTS = 12
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
    kinds = log.categories()
    temporaries, gradients = map(log.CATEGORIES.index, ("temporaries", "gradients"))
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
            kinds[held[kinds[held] == temporaries]] = gradients
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


#: the first address of a snapshot, like those of a card
_BASE = 0x7F0000000000


def write_snapshot(cell: Cell, rank: int, path: Path) -> Path:
    """Write a snapshot of a rank's memory over set-up and the traced steps; returns the path.

    Raises:
        UserError: the file cannot be written.
    """
    with measure.keeping_traces():
        log = measure.trace_rank(cell, rank, events=measure.can_time(cell)).memory
    return write_whole(path, pickle.dumps(snapshot(log, measure.allocator_of(cell))))


def snapshot(
    log: measure.MemoryLog, kind: type[measure.CachingAllocator] = measure.CachingAllocator
) -> dict[str, Any]:
    """The snapshot of a log: its events, and its segments at the end, with the blocks of an allocator of
    class ``kind`` on a card without a limit. In place of a stack trace it names a storage's kind, module and
    phase; ``time_us`` is the number of the event."""
    allocator, kinds, streams = kind(), log.categories(), log.streams or [0] * len(log.sizes)
    held: dict[int, Any] = {}
    frames: dict[int, list[dict[str, Any]]] = {}
    storages: dict[int, int] = {}
    events: list[dict[str, Any]] = []

    def note(action: str, at: int, number: int, address: int, nbytes: int) -> None:
        stream, of = streams[number], frames[number]
        place = {"addr": _BASE + address, "size": nbytes, "stream": stream, "frames": of, "time_us": at}
        events.append({"action": action, **place})

    for at, event in enumerate(log.events):
        number = abs(event) - 1
        nbytes = log.sizes[number]
        if event < 0 and number in held:
            block = held.pop(number)
            for action in ("free_requested", "free_completed"):
                note(action, at, number, block.address, nbytes)
            del storages[block.address]
            allocator.give_back(block)
        elif event > 0 and nbytes:
            reserved = allocator.reserved
            held[number] = block = allocator.take(nbytes, streams[number])
            module = log.place_names[log.places[number]] if log.places else ""
            step, phase = log.step_of(at), log.phase_of(at)
            words = (log.CATEGORIES[kinds[number]], module, f"{phase} of step {step}" if step else phase)
            frames[number] = [{"name": word, "filename": "spbench", "line": 0} for word in words if word]
            storages[block.address] = number
            if allocator.reserved > reserved:
                note("segment_alloc", at, number, block.address, allocator.reserved - reserved)
            note("alloc", at, number, block.address, nbytes)
    segments = []
    for blocks in allocator.segments():
        stream, small = allocator.pool_of(blocks[0][0])
        pool = {"stream": stream, "segment_type": "small" if small else "large"}
        pool["is_expandable"] = kind is measure.ExpandableSegments
        segments.append({**_segment(blocks, storages, log.sizes, frames), **pool})
    return {"segments": segments, "device_traces": [events], "allocator_settings": {}}


def _segment(
    blocks: list[tuple[int, int, bool]],
    storages: Mapping[int, int],
    sizes: list[int],
    frames: Mapping[int, list[dict[str, Any]]],
) -> dict[str, Any]:
    allocated = sum(nbytes for _, nbytes, free in blocks if not free)
    total = sum(nbytes for _, nbytes, _ in blocks)
    shown = [
        {
            "address": _BASE + address,
            "size": nbytes,
            "requested_size": 0 if free else sizes[storages[address]],
            "state": "inactive" if free else "active_allocated",
            "frames": [] if free else frames[storages[address]],
        }
        for address, nbytes, free in blocks
    ]
    return {
        "device": 0,
        "address": _BASE + blocks[0][0],
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(each["requested_size"] for each in shown),
        "segment_pool_id": (0, 0),
        "frames": [],
        "blocks": shown,
    }
