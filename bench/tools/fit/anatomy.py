"""What a rank's memory is made of: its largest moment taken apart, the curve around it, and how small a card
it would fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from spbench.bench.measure.memory.allocator import CachingAllocator
from spbench.bench.measure.memory.repeated_events import stretches
from spbench.bench.measure.memory.replay import replay
from spbench.bench.measure.trace.memory_log import CATEGORIES, MemoryLog
from spbench.bench.tools.fit.fullest import least_usable

#: points of the curve, each the largest of its run of events
_POINTS = 600
#: parts of the peak, by kind and module, that have a line each; all smaller ones share one
_MOST_PARTS = 12


@dataclass(frozen=True)
class Moment:
    """When a rank's memory is largest.

    Attributes:
        step: from 1; 0 is set-up.
        phase: of the step; "set-up" before it.
        micro_batch, micro_batches: of a forward or backward, from 1; 0 elsewhere.
        module: in whose forward or backward; "": in none. Numbers of layers are ``*``.
    """

    step: int
    phase: str
    micro_batch: int
    micro_batches: int
    module: str


@dataclass(frozen=True)
class Anatomy:
    """The memory of a rank at its largest moment, set-up included.

    Attributes:
        peak_memory_bytes: of blocks that are given out at that moment.
        reserved_memory_bytes: the most that the allocator reserves, on a card without a limit.
        least_usable_bytes: of the smallest card on which it fits, to 2 MiB or 0.1%; the allocator then gives
            back what is free before it asks for more.
        held: bytes by kind at the moment, largest first, without zeros.
        parts: the same by kind and module: ``kind``, ``module``, ``bytes`` and ``tensors``, largest first;
            the last has the rest, with ``kind`` "".
        curve: ``event`` and, by kind, bytes at the largest moments of equal runs of events, in order.
        phases: (name, event of its start), a run of one name once.
        events: how many there are.
    """

    moment: Moment
    peak_memory_bytes: int
    reserved_memory_bytes: int
    least_usable_bytes: int
    held: Mapping[str, int]
    parts: list[dict[str, Any]]
    curve: Mapping[str, list[int]]
    phases: list[tuple[str, int]]
    events: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def anatomy(
    log: MemoryLog, kind: type[CachingAllocator] = CachingAllocator, least: int | None = None
) -> Anatomy:
    """Take a rank's log apart, its blocks as an allocator of that kind gives them out.

    Args:
        least: as :func:`least_usable` has it, where that is known.
    """
    repeated = stretches(log.sizes, log.events, log.streams)
    found = replay(log.sizes, log.events, None, (), log.streams, kind, repeated)
    blocks, events = np.asarray(found.blocks, dtype=np.int64), np.asarray(log.events, dtype=np.int64)
    signed = np.sign(events) * blocks[np.abs(events) - 1]
    live = np.cumsum(signed)
    at = int(np.argmax(live))
    kinds = np.asarray([CATEGORIES.index(name) for name in log.categories()])
    alive = _alive(events, at, len(blocks))
    held = {name: int(blocks[alive & (kinds == kind)].sum()) for kind, name in enumerate(CATEGORIES)}
    return Anatomy(
        moment=_moment(log, at),
        peak_memory_bytes=int(live[at]),
        reserved_memory_bytes=found.peak_reserved,
        least_usable_bytes=least or least_usable(log, int(live[at]), found.peak_reserved, kind),
        held=dict(sorted(((k, n) for k, n in held.items() if n), key=lambda item: -item[1])),
        parts=_parts(log, blocks, kinds, alive),
        curve=_curve(live, signed, kinds[np.abs(events) - 1]),
        phases=_phases(log),
        events=len(events),
    )


def _alive(events: np.ndarray, at: int, count: int) -> np.ndarray:
    until = events[: at + 1]
    alive = np.zeros(count, dtype=bool)
    alive[until[until > 0] - 1] = True
    alive[-until[until < 0] - 1] = False
    return alive


def _moment(log: MemoryLog, at: int) -> Moment:
    step, phase = log.step_of(at), log.phase_of(at)
    ends = [log.step_start, *log.step_ends]
    begins = [
        first for name, first in log.marks if step and name == phase and ends[step - 1] <= first < ends[step]
    ]
    number = abs(log.events[at]) - 1 if log.events else 0
    module = log.place_names[log.places[number]] if log.places else ""
    return Moment(step, phase, sum(first <= at for first in begins), len(begins), module)


def _parts(log: MemoryLog, blocks: np.ndarray, kinds: np.ndarray, alive: np.ndarray) -> list[dict[str, Any]]:
    places = np.asarray(log.places or [0] * len(blocks))
    names = log.place_names or [""]
    of_both = (kinds * len(names) + places)[alive]
    sums = np.bincount(of_both, weights=blocks[alive])
    counts = np.bincount(of_both)
    order = [int(n) for n in np.argsort(-sums, kind="stable") if sums[n]]
    parts = [
        {
            "kind": CATEGORIES[n // len(names)],
            "module": names[n % len(names)],
            "bytes": int(sums[n]),
            "tensors": int(counts[n]),
        }
        for n in order[:_MOST_PARTS]
    ]
    if rest := order[_MOST_PARTS:]:
        nbytes, tensors = (int(sum(of[n] for n in rest)) for of in (sums, counts))
        parts.append({"kind": "", "module": "", "bytes": nbytes, "tensors": tensors})
    return parts


def _curve(live: np.ndarray, signed: np.ndarray, kinds: np.ndarray) -> dict[str, list[int]]:
    bounds = np.unique(np.linspace(0, len(live), _POINTS + 1).astype(int))
    at = [int(a + np.argmax(live[a:b])) for a, b in pairwise(bounds)]
    curve = {"event": at}
    for kind, name in enumerate(CATEGORIES):
        of_kind = np.cumsum(np.where(kinds == kind, signed, 0))[at]
        if of_kind.any():
            curve[name] = of_kind.tolist()
    return curve


def _phases(log: MemoryLog) -> list[tuple[str, int]]:
    phases = [("set-up", 0), *log.marks]
    return [each for each, before in zip(phases, [("", 0), *phases], strict=False) if each[0] != before[0]]
