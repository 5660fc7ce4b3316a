"""The log of a rank's memory (births and deaths of storages in order), and the peaks of live bytes.

:mod:`measure.memory.allocator` has the blocks that a card's allocator gives out for the same events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from spbench.bench.measure.memory.allocator import rounded
from spbench.bench.measure.trace.torch_internals import beyond_64_bits

#: the name of the time before the first traced step, in place of a phase
SET_UP = "set-up"


@dataclass
class MemoryLog:
    """The births and deaths of a rank's storages, in order.

    Attributes:
        sizes: bytes of each storage, by its number.
        events: number + 1 for the birth of a storage, -(number + 1) for its death.
        marks: (phase, index of its first event) in order.
        tags: by storage, its category, if the engine or a meter has set it.
        ends: the first event after each traced step, in order; empty: the log has one step, to its end.
        workspaces: by storage that is a library's workspace, the library's name in a cluster's file. The
            bytes of workspaces depend on the card (:meth:`with_workspaces`); until then they are 0.
        places: for each storage, the index in ``place_names`` of the module in whose forward or backward the
            storage was made (see :class:`ModuleCalls`); empty: not known.
        streams: for each storage, the stream on which it was made, 0 for the compute stream (see
            :class:`Streams`); empty: all storages are of the compute stream.
    """

    #: the categories of tensors that are kept from step to step, and of all
    STATES = ("parameters", "gradients", "optimizer_state")
    CATEGORIES = (*STATES, "inputs", "activations", "communication_buffers", "workspaces", "temporaries")

    sizes: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    tags: dict[int, str] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    workspaces: dict[int, str] = field(default_factory=dict)
    streams: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list, compare=False)
    place_names: list[str] = field(default_factory=list, compare=False)

    def with_workspaces(self, nbytes: Mapping[str, int]) -> MemoryLog:
        """The same log, in which each workspace has the bytes of its library in ``nbytes``, or else 0."""
        sizes = [*self.sizes]
        for number, name in self.workspaces.items():
            sizes[number] = nbytes.get(name, 0)
        return replace(self, sizes=sizes)

    def with_ordered_deaths(self) -> MemoryLog:
        """The same log, in which consecutive deaths are in the order of the births. Storages that are
        released at once, such as those of autograd's graph, die in an order that depends on addresses. The
        order makes no difference to the storages that are alive afterwards."""
        events = np.asarray(self.events, dtype=np.int64)
        dies = events < 0
        follows = np.zeros(len(events) + 1, dtype=bool)
        follows[1:-1] = dies[1:] & dies[:-1]
        follows[[*self.ends, *(first for _, first in self.marks)]] = False
        run = np.cumsum(~follows[:-1])
        return replace(self, events=events[np.lexsort((-events, run))].tolist())

    def signed_bytes(self) -> np.ndarray:
        """[events]: the bytes, in whole granules, that each event adds to (or takes from) the live bytes."""
        events = np.asarray(self.events, dtype=np.int64)
        return np.sign(events) * rounded(np.asarray(self.sizes, dtype=np.int64))[np.abs(events) - 1]

    def spans(self) -> list[tuple[str, slice]]:
        """(phase, slice of its events), in order; forward and backward occur once for each micro-batch."""
        starts = [*(start for _, start in self.marks), len(self.events)]
        return [(name, slice(start, end)) for (name, start), end in zip(self.marks, starts[1:], strict=True)]

    def phase_ends(self) -> list[dict[str, int]]:
        """For each traced step, by the name of a phase, the first event after the last phase of that name."""
        ends: list[dict[str, int]] = [{} for _ in self.step_ends]
        for name, span in self.spans():
            step = self.step_of(span.start) - 1
            ends[step][name] = min(span.stop, self.step_ends[step])
        return ends

    @property
    def step_start(self) -> int:
        """The first event of the first traced step; all earlier events belong to set-up."""
        return self.marks[0][1] if self.marks else 0

    @property
    def step_ends(self) -> list[int]:
        """The first event after each traced step."""
        return self.ends or [len(self.events)]

    def step_of(self, event: int) -> int:
        """The number (from 1) of the traced step to which an event belongs; 0: it belongs to set-up."""
        return 0 if event < self.step_start else bisect_right(self.step_ends[:-1], event) + 1

    def phase_of(self, event: int) -> str:
        """The name of the phase to which an event belongs; SET_UP: the event is before the first phase."""
        return next((name for name, first in reversed(self.marks) if first <= event), SET_UP)

    def peak(self) -> Peak:
        """The peak of live bytes over the traced steps, in whole granules, as an allocator that splits every
        block would count it."""
        levels = self.levels(rounded(np.asarray(self.sizes, dtype=np.int64)))
        return max(levels.steps, key=lambda peak: peak.nbytes)

    def levels(self, nbytes: Sequence[int] | np.ndarray) -> Levels:
        """The live bytes after each event, and the peaks of set-up and of each traced step.

        Args:
            nbytes: the bytes of each storage, by its number, as an allocator counts them.

        Raises:
            Unsupported: a sum of bytes does not fit in 64 bits.
        """
        events, nbytes = np.asarray(self.events, dtype=np.int64), np.asarray(nbytes, dtype=np.int64)
        live: np.ndarray = np.cumsum(np.sign(events) * nbytes[np.abs(events) - 1])
        if live.min(initial=0) < 0:  # a sum beyond 64 bits wraps to negative numbers
            raise beyond_64_bits("what is alive at once has")
        categories = self.categories()
        peaks: list[Peak] = []
        for start, end in pairwise([0, self.step_start, *self.step_ends]):
            at = start + int(np.argmax(live[start:end])) if end > start else start - 1
            if at < 0:
                peaks.append(Peak(0, SET_UP, dict.fromkeys(MemoryLog.CATEGORIES, 0), 0))
                continue
            alive = self.alive_after(at)
            held = {
                name: int(nbytes[alive & (categories == n)].sum())
                for n, name in enumerate(MemoryLog.CATEGORIES)
            }
            peaks.append(Peak(int(live[at]), self.phase_of(at), held, int(live[end - 1])))
        return Levels(live, peaks[0], peaks[1:])

    def alive_after(self, event: int) -> np.ndarray:
        """[storages]: whether each storage is alive after the event with that index."""
        until = np.asarray(self.events[: event + 1], dtype=np.int64)
        alive = np.zeros(len(self.sizes), dtype=bool)
        alive[until[until > 0] - 1] = True
        alive[-until[until < 0] - 1] = False  # each storage is born once and dies once, after that
        return alive

    def parts_after(
        self, event: int, nbytes: np.ndarray, kinds: np.ndarray
    ) -> list[tuple[int, str, int, int]]:
        """What is alive after an event, by kind and place: (number of the kind, name of the place, bytes,
        storages), the most bytes first.

        Args:
            nbytes, kinds: [storages]: the bytes of each storage, and the number of its kind.
        """
        alive, names = self.alive_after(event), self.place_names or [""]
        places = np.asarray(self.places or [0] * len(nbytes))
        of_both = (kinds * len(names) + places)[alive]
        sums, counts = np.bincount(of_both, weights=nbytes[alive]), np.bincount(of_both)
        order = (int(n) for n in np.argsort(-sums, kind="stable") if sums[n])
        return [(n // len(names), names[n % len(names)], int(sums[n]), int(counts[n])) for n in order]

    def parts_at_peak(self) -> list[tuple[int, str, int, int]]:
        """What is alive at the peak of the traced steps, as :meth:`parts_after`."""
        live = np.cumsum(self.signed_bytes())
        at = self.step_start + int(np.argmax(live[self.step_start :]))
        return self.parts_after(at, rounded(np.asarray(self.sizes, dtype=np.int64)), self.categories())

    def categories(self) -> np.ndarray:
        """[storages]: the category of each storage, as an index into :attr:`CATEGORIES`: its tag; else
        "activations" if a forward made the storage and left it alive; else "temporaries"."""
        events = np.asarray(self.events, dtype=np.int64)
        kept = np.zeros(len(self.sizes), dtype=bool)
        for name, span in self.spans():
            if name == "forward":
                inside = events[span]
                is_born = np.zeros(len(self.sizes), dtype=bool)
                is_born[inside[inside > 0] - 1] = True
                is_born[-inside[inside < 0] - 1] = False
                kept |= is_born
        places = {name: n for n, name in enumerate(self.CATEGORIES)}
        categories = np.where(kept, places["activations"], places["temporaries"])
        categories[[*self.tags]] = [places[tag] for tag in self.tags.values()]
        return categories


@dataclass(frozen=True)
class Peak:
    """The peak of live bytes of a step, or of set-up.

    Attributes:
        nbytes: the largest sum of live bytes.
        phase: the phase in which the peak falls; SET_UP: before the first phase.
        held: bytes of each category at the peak.
        at_end: live bytes at the end of the step.
    """

    nbytes: int
    phase: str
    held: dict[str, int]
    at_end: int


class Levels(NamedTuple):
    """The live bytes of a log.

    Attributes:
        live: [events]: the live bytes after each event.
        setup, steps: the peaks of set-up, and of each traced step.
    """

    live: np.ndarray
    setup: Peak
    steps: list[Peak]
