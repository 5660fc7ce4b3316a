"""Stages of a pipeline that differ only in how many micro-batches they hold: few are traced, the others are
put together from their parts.

Time is counted in turns: turn t runs the forward of micro-batch t and the backward of micro-batch t - ahead,
where there are these. So a step has a warm-up of forwards, a steady state of both, and an end of backwards.
Stages whose modules have the same form do the same in a turn of the same kind, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.simulator.program import WAIT, Program
from spbench.bench.measure.trace.memory_log import MemoryLog

#: turns of one kind that are told apart before they repeat; what a turn frees or waits for is of one of as
#: many turns before it, or of its micro-batch's forward
_APART = 2
#: the fewest micro-batches held by a stage whose parts others are put together from
_FEWEST = 2 * _APART
#: the phases of a turn; all others come after the last turn
OF_TURNS = ("forward", "backward")

#: (step, turn); the last turn of a step is followed by its end, and set-up is before the first
_Key = tuple[int, int]
_SET_UP = (-1, 0)


class NotAlike(ValueError):
    """A trace is not made of turns that depend only on how many micro-batches the stage holds."""


@dataclass(frozen=True)
class Turns:
    """The turns of a step: of ``count`` micro-batches, ``ahead`` of which run forward before the first
    backward."""

    count: int
    ahead: int

    def __len__(self) -> int:
        return self.count + self.ahead

    def phases(self, turn: int) -> list[str]:
        """The phases of a turn, in order."""
        return [*OF_TURNS[turn >= self.count : 1 + (turn >= self.ahead)]]

    @property
    def complete(self) -> bool:
        """Whether turns of every kind occur."""
        return self.ahead >= _FEWEST and self.count > 2 * self.ahead + _APART

    def like(self, turn: int, other: Turns) -> int:
        """The turn of another stage that does what this stage does in a turn; both :attr:`complete`."""
        back = turn - self.ahead
        if turn < self.ahead:
            return min(turn, _APART)
        if back < self.ahead:  # of a micro-batch of the warm-up
            return other.ahead + min(back, _APART)
        if turn < self.count - 1:
            return 2 * other.ahead + min(back - self.ahead, _APART)
        if turn in (self.count - 1, len(self) - 1, len(self)):
            return turn - self.count + other.count if turn < self.count else turn - len(self) + len(other)
        return other.count + min(turn - self.count, _APART)

    def moved(self, turn: int, of: int, other: Turns, to: int) -> int:
        """The turn that turn ``to`` of another stage refers to, where its like, ``turn`` of this stage,
        refers to turn ``of``.

        Raises:
            NotAlike: it cannot be told which.
        """
        by = turn - of
        if turn < len(self):
            if by <= _APART:
                return to - by
            if by - self.ahead in (0, 1):  # what the micro-batch's forward made, or received before it
                return to - by + self.ahead - other.ahead
        else:  # the end of the step refers to the first and the last turns of each kind
            for mine, theirs in ((len(self), len(other)), (self.count, other.count)):
                if abs(of - mine) <= _APART:
                    return of - mine + theirs
            if of <= 1 or of - self.ahead in (0, 1):
                return of if of <= 1 else of - self.ahead + other.ahead
        raise NotAlike(f"turn {turn} refers to turn {of}")


class _Cut:
    """A list with marks of phases, cut into set-up, the turns of each step, and the ends of steps.

    Attributes:
        keys: of the parts, in order.
        starts: the first entry of each part, and the length of the list.
        marks: of each part, (phase, entry of the part).

    Raises:
        NotAlike: the phases are not those of turns.
    """

    def __init__(self, marks: Sequence[tuple[str, int]], length: int, turns: Turns, steps: int):
        self.turns, self.steps, self.keys = turns, steps, _keys(turns, steps)
        names = [name for name, _ in marks]
        self.starts, at = [0], 0
        self.marks: list[list[tuple[str, int]]] = [[]]
        for _, turn in self.keys[1:]:
            end = at
            if turn < len(turns):
                end += len(turns.phases(turn))
                if names[at:end] != turns.phases(turn):
                    raise NotAlike(f"turn {turn} is {', '.join(names[at:end])}")
            else:
                while end < len(names) and names[end] not in OF_TURNS:
                    end += 1
            start = marks[at][1] if at < end else length
            self.starts.append(start)
            self.marks.append([(name, first - start) for name, first in marks[at:end]])
            at = end
        if at < len(names):
            raise NotAlike(f"{names[at]} comes after the last step")
        self.starts.append(length)

    def part(self, at: int) -> slice:
        """The entries of the part at a place of :attr:`keys`."""
        return slice(self.starts[at], self.starts[at + 1])


def _keys(turns: Turns, steps: int) -> list[_Key]:
    return [_SET_UP, *((step, turn) for step in range(steps) for turn in range(len(turns) + 1))]


class _Rearranged:
    """The parts of a cut list, put together for other turns, and what is numbered through them.

    Args:
        first: of each part the first number that is given in it, and the number of all.
        kinds: of each number, what it must have in common with the one that stands in its place.

    Attributes:
        likes: for each part of the other turns, the place of the part that it is a copy of.
        shifts: by how much the numbers of that part are larger there.
    """

    def __init__(self, cut: _Cut, turns: Turns, first: Sequence[int], kinds: np.ndarray):
        self.cut, self.turns, self.first, self.kinds = cut, turns, first, kinds
        place = {key: at for at, key in enumerate(cut.keys)}
        self.keys = _keys(turns, cut.steps)
        self.likes = [
            place[step, turns.like(turn, cut.turns) if step >= 0 else turn] for step, turn in self.keys
        ]
        counts = [first[at + 1] - first[at] for at in self.likes]
        begins = np.concatenate(([0], np.cumsum(counts)))
        self.place = {key: at for at, key in enumerate(self.keys)}
        self.shifts = [int(begin) - first[like] for begin, like in zip(begins, self.likes, strict=False)]

    def renumbered(self, place: int, numbers: np.ndarray) -> np.ndarray:
        """The numbers that a part refers to, as the part at that place of the other turns does.

        Raises:
            NotAlike: they are of other kinds, or it cannot be told which they are.
        """
        owners = np.searchsorted(self.first[1:], numbers, side="right")
        by = np.zeros(len(self.first), dtype=np.int64)
        for owner in np.unique(owners).tolist():
            there = self._place_of(owner, place)
            like = self.likes[there]
            if like != owner and not np.array_equal(self._kinds(like), self._kinds(owner)):
                raise NotAlike(f"parts {self.cut.keys[like]} and {self.cut.keys[owner]} differ")
            by[owner] = self.shifts[there] + self.first[like] - self.first[owner]
        return numbers + by[owners]

    def _kinds(self, at: int) -> np.ndarray:
        return self.kinds[self.first[at] : self.first[at + 1]]

    def _place_of(self, owner: int, place: int) -> int:
        """The place of the part that the one at ``place`` refers to, where its like refers to ``owner``."""
        (step, turn), (step_there, to) = self.cut.keys[owner], self.keys[place]
        if step < 0:
            return owner
        of_like = self.cut.keys[self.likes[place]][1]
        if step < step_there:  # as seen from the end of that step
            of_like, to = len(self.cut.turns), len(self.turns)
        key = step, self.cut.turns.moved(of_like, turn, self.turns, to)
        if key not in self.place:
            raise NotAlike(f"there is no turn {key}")
        return self.place[key]

    def joined(self, values: np.ndarray) -> np.ndarray:
        """What each part has of a list, for all parts of the other turns."""
        return np.concatenate([values[self.cut.part(at)] for at in self.likes])

    def marks(self) -> list[tuple[str, int]]:
        """The marks of the phases."""
        found, start = [], 0
        for at in self.likes:
            found += [(name, start + first) for name, first in self.cut.marks[at]]
            start += self.cut.starts[at + 1] - self.cut.starts[at]
        return found


def put_together(trace: Trace, held: Turns, turns: Turns) -> Trace:
    """The trace of a stage with other turns than the traced one, which has ``held``; both complete.

    Raises:
        NotAlike: it cannot be told from that trace.
    """
    program = None if trace.program is None else _program(trace.program, held, turns)
    memory, on_host = (_memory(log, held, turns) for log in (trace.memory, trace.host_memory))
    return replace(trace, memory=memory, host_memory=on_host, program=program)


def _memory(log: MemoryLog, held: Turns, turns: Turns) -> MemoryLog:
    events, sizes = np.asarray(log.events, dtype=np.int64), np.asarray(log.sizes, dtype=np.int64)
    cut = _Cut(log.marks, len(events), held, len(log.step_ends))
    first = np.concatenate(([0], np.cumsum(events > 0)))[cut.starts].tolist()
    whole = _Rearranged(cut, turns, first, sizes)
    numbers = [
        np.sign(part) * (whole.renumbered(place, np.abs(part) - 1) + 1)
        for place, part in enumerate(events[cut.part(at)] for at in whole.likes)
    ]

    def of_storages(known: Mapping[int, str]) -> dict[int, str]:
        by_part: list[list[int]] = [[] for _ in cut.keys]
        for number, part in zip(known, np.searchsorted(first[1:], [*known], side="right"), strict=True):
            by_part[part].append(number)
        pairs = zip(whole.likes, whole.shifts, strict=True)
        return {number + by: known[number] for like, by in pairs for number in by_part[like]}

    ends: list[int] = []
    start = 0
    for (_, turn), like, part in zip(whole.keys, whole.likes, numbers, strict=True):
        if turn == len(turns) and log.ends:
            ends.append(start + log.ends[len(ends)] - cut.starts[like])
        start += len(part)

    def born(of_storages: np.ndarray) -> list[int]:
        parts = [of_storages[first[at] : first[at + 1]] for at in whole.likes]
        return np.concatenate(parts).tolist() if len(of_storages) else []

    return MemoryLog(
        sizes=born(sizes),
        events=np.concatenate(numbers).tolist(),
        marks=whole.marks(),
        tags=of_storages(log.tags),
        ends=ends,
        workspaces=of_storages(log.workspaces),
        places=born(np.asarray(log.places)),
        streams=born(np.asarray(log.streams)),
        place_names=log.place_names,
    )


def _program(program: Program, held: Turns, turns: Turns) -> Program:
    cut = _Cut(program.marks, len(program), held, 1)
    whole = _Rearranged(cut, turns, cut.starts, program.kind)
    columns: dict[str, Any] = {
        field.name: whole.joined(column)
        for field in fields(program)
        if isinstance(column := getattr(program, field.name), np.ndarray)
    }
    partners = []
    for place, at in enumerate(whole.likes):
        partner = program.partner[cut.part(at)].copy()
        waits = program.kind[cut.part(at)] == WAIT
        partner[waits] = whole.renumbered(place, partner[waits])
        partners.append(partner)
    return replace(program, **columns | {"partner": np.concatenate(partners), "marks": tuple(whole.marks())})


def same(ours: Trace, theirs: Trace) -> bool:
    """Whether two traces have the same memory logs, counts of communication and program."""
    if ours.memory != theirs.memory or ours.communication.counts != theirs.communication.counts:
        return False
    if ours.host_memory != theirs.host_memory:
        return False
    if ours.program is None or theirs.program is None:
        return ours.program is theirs.program
    pairs = [
        (getattr(ours.program, field.name), getattr(theirs.program, field.name)) for field in fields(Program)
    ]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)
