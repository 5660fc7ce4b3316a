"""Steps of a loop that are alike: a few are run, the others are written down from the last of them.

A ring of N ranks takes N steps a layer, and nearly all of them do the same: they call the same operators on
the same shapes, post the same messages, and free what an earlier step made. So do the micro-batches of a
pipeline stage once it alternates forward and backward. :class:`RepeatedSteps` watches what a loop of
:mod:`impls.keyed_steps` writes into the meters, step by step. Where the last two steps have one key and wrote
the same, the last one is written down again for each further step of that key, and the loop goes on after
them.

"The same" is up to numbering: a step's storages and events follow those of the step before at a distance,
which is the number of storages and events of one step. Two steps count as the same where

- sizes, tags and counts are equal, births, deaths, rows and the beginnings of phases are equal at that
  distance, and what dies or is waited for is no older than the first step of the key;
- what lives at the end of one lives at the end of the other, at that distance, and so does what is posted and
  not yet waited for. So a loop that gathers tensors is run in full, unless it says in which list
  (:mod:`spbench.bench.meters.kept_tensors`);
- no other loop that began in a step outlived it, and autograd recorded nothing, whose graph would be shorter,
  unless each step runs the backward of an earlier one.

What a step leaves in Python objects alone is not seen, nor what it does by the number of the step. So it is
trusted that a step depends on its key alone; a test compares the loops of each registered strategy with whole
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spbench.bench.meters.communication import CommunicationMeter, Operation
from spbench.bench.meters.event_log import EventLog
from spbench.bench.meters.kept_tensors import KeptTensors
from spbench.bench.meters.memory import MemoryMeter
from spbench.bench.simulator.program import KERNEL, WAIT
from spbench.bench.simulator.program_builder import EventRow
from spbench.impls.keyed_steps import Key


class _Record(Protocol):
    """What a meter has written during consecutive steps of one key."""

    def end_step(self) -> None:
        """Note that a step has ended."""

    def repeats(self) -> bool:
        """Whether the last two steps wrote the same, and left the same behind."""

    def repeat(self, times: int) -> None:
        """Write the last step down that many times more; asked for where :meth:`repeats` is true."""


@dataclass(eq=False)
class _Loop:
    """A loop that has begun and not ended. ``backward_within``: see :func:`keyed_steps`. ``whole``: each of
    its steps must be run."""

    backward_within: bool
    whole: bool = False

    def check_graph(self) -> None:
        """Run each step where autograd records a graph over all of them."""
        self.whole = self.whole or (torch.is_grad_enabled() and not self.backward_within)


class RepeatedSteps:
    """Chooses which steps of the loops of a trace are run, for :func:`choosing_steps`, and writes the others
    into the meters."""

    def __init__(self, memory: MemoryMeter, communication: CommunicationMeter, events: EventLog | None):
        self.memory, self.communication, self.events = memory, communication, events
        self._loops: list[_Loop] = []

    def __call__(self, size: int, key: Key, backward_within: bool, kept: list[Tensor]) -> Iterator[int]:
        """The steps to be run of a loop of ``size`` steps, in order; see :func:`keyed_steps`."""
        loop = _Loop(backward_within)
        loop.check_graph()
        self._loops.append(loop)
        try:
            step = 0
            while step < size:
                current, records = key(step), self._records(kept)
                while step < size and key(step) == current:
                    yield step
                    step += 1
                    if self._settled(loop, records):
                        step += self._written_on(records, step, size, key)
        finally:
            self._loops.remove(loop)

    def _records(self, kept: list[Tensor]) -> list[_Record]:
        program = [] if self.events is None else [_EventRecord(self.events)]
        return [_StorageRecord(self.memory, kept), *program, _MessageRecord(self.communication)]

    def _settled(self, loop: _Loop, records: Sequence[_Record]) -> bool:
        """Whether a step that has just ended stands for all further ones of its key."""
        began_later = self._loops[self._loops.index(loop) + 1 :]
        for other in began_later:
            other.whole = True
        loop.whole = loop.whole or bool(began_later)
        loop.check_graph()
        if loop.whole:
            return False
        for record in records:
            record.end_step()
        return all(record.repeats() for record in records)

    def _written_on(self, records: Sequence[_Record], step: int, size: int, key: Key) -> int:
        """Write down the steps from ``step`` on that have the key of the one before; returns how many."""
        current, end = key(step - 1), step
        while end < size and key(end) == current:
            end += 1
        for record in records:
            record.repeat(end - step)
        return end - step


class _Unfinished:
    """What began during the steps of a key and has not ended, as numbers."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._before: set[int] = set()

    def end_step(self, began_or_ended: Iterable[tuple[int, bool]]) -> None:
        """Take in what a step did, in order: a number, and whether that began or ended."""
        self._before = set(self.numbers)
        for number, began in began_or_ended:
            (self.numbers.add if began else self.numbers.discard)(number)

    def is_that_of_the_step_before(self, by: int) -> bool:
        """Whether the last step left behind what the one before did, with numbers larger by ``by``."""
        same_number = len(self._before) == len(self.numbers)
        return same_number and self.numbers == {number + by for number in self._before}


class _Written(NamedTuple):
    """How much a memory log holds."""

    births: int
    changes: int
    tags: int
    phases: int


class _StorageRecord:
    """The births, deaths and tags of storages."""

    def __init__(self, meter: MemoryMeter, kept: list[Tensor]):
        self.meter, self.log = meter, meter.log
        self._ends, self._kept = [self._written()], KeptTensors(kept, meter)
        self._living = _Unfinished()

    def _written(self) -> _Written:
        log = self.log
        return _Written(len(log.sizes), len(log.events), len(log.tags), len(log.marks))

    def end_step(self) -> None:
        changes = self.log.events[self._ends[-1].changes :]
        self._kept.end_step()
        # a library's first product makes a workspace, wherever it is
        lasting = self._kept.numbers.union(self.log.workspaces)
        self._living.end_step(
            (abs(change) - 1, change > 0) for change in changes if abs(change) - 1 not in lasting
        )
        self._ends.append(self._written())

    def repeats(self) -> bool:
        if len(self._ends) < 3:
            return False
        first, (a, b, c) = self._ends[0], self._ends[-3:]
        births, before = c.births - b.births, self.log.events[a.changes : b.changes]
        return (
            b.births - a.births == births
            and _marks(self.log.marks[a.phases : b.phases], a.changes)
            == _marks(self.log.marks[b.phases : c.phases], b.changes)
            and self.log.sizes[a.births : b.births] == self.log.sizes[b.births : c.births]
            and self.log.events[b.changes : c.changes] == _later_changes(before, births)
            and all(abs(change) > first.births for change in before)
            and self._living.is_that_of_the_step_before(births)
            and self._kept.repeats(b.births, births)
            and self._tags(a, b) == self._tags(b, c)
            and self._tagged_at_once(a, b)
            and self._tagged_at_once(b, c)
        )

    def _tags(self, start: _Written, end: _Written) -> list[str | None]:
        """The tags of the storages born in a step, in their order."""
        return [self.log.tags.get(number) for number in range(start.births, end.births)]

    def _tagged_at_once(self, start: _Written, end: _Written) -> bool:
        """Whether the storages born in a step got their tags in it, and no others did."""
        return end.tags - start.tags == sum(tag is not None for tag in self._tags(start, end))

    def repeat(self, times: int) -> None:
        log, first, (start, end) = self.log, self._ends[0], self._ends[-2:]
        births, tags = end.births - start.births, self._tags(start, end)
        changes, marks = log.events[start.changes : end.changes], log.marks[start.phases : end.phases]
        for of_storages in (log.sizes, log.places):
            of_storages += of_storages[start.births : end.births] * times
        for n in range(1, times + 1):
            log.events += _later_changes(changes, n * births)
            log.marks += _marks(marks, -n * len(changes))
        for place, tag in enumerate(tags):
            if tag is not None:
                again = range(end.births + place, end.births + place + times * births, births)
                log.tags |= dict.fromkeys(again, tag)
        self.meter.renumber(first.births, times * births)
        self._kept.repeat(times, births)


def _later_changes(changes: Sequence[int], by: int) -> list[int]:
    """Births and deaths, as :class:`MemoryLog` has them, of storages with numbers larger by ``by``."""
    return [change + by if change > 0 else change - by for change in changes]


def _marks(marks: Sequence[tuple[str, int]], start: int) -> list[tuple[str, int]]:
    """The phases that began, with their first events counted from ``start``."""
    return [(phase, first - start) for phase, first in marks]


class _EventRecord:
    """The events of the program and its phases; what is posted must be waited for, on the stream that all is
    issued on."""

    def __init__(self, log: EventLog):
        self.log, self.rows, self.marks = log, log.builder.rows, log.builder.marks
        self._ends, self._phases = [len(self.rows)], [len(self.marks)]
        self._switches = len(log.builder.switches)
        self._posted = _Unfinished()

    def end_step(self) -> None:
        self._posted.end_step(self._posts_and_waits(self._ends[-1]))
        self._ends.append(len(self.rows))
        self._phases.append(len(self.marks))

    def _marks_of_step(self, number: int) -> list[tuple[str, int]]:
        """The phases that began in the step with that number, counted from its start; -1 is the last."""
        first, end = self._phases[number - 1 : number + 1 or None]
        return _marks(self.marks[first:end], self._ends[number - 1])

    def _posts_and_waits(self, start: int) -> Iterator[tuple[int, bool]]:
        for event, row in enumerate(self.rows[start:], start):
            if row[0] == WAIT:
                yield row[-1], False
            elif row[0] != KERNEL:
                yield event, True

    def repeats(self) -> bool:
        if len(self._ends) < 3 or self._switches != len(self.log.builder.switches):
            return False
        first, (a, b, c) = self._ends[0], self._ends[-3:]
        before = self.rows[a:b]
        return (
            self.rows[b:c] == _later_rows(before, c - b)
            and all(row[-1] >= first for row in before if row[0] == WAIT)
            and self._marks_of_step(-1) == self._marks_of_step(-2)
            and self._posted.is_that_of_the_step_before(c - b)
        )

    def repeat(self, times: int) -> None:
        first, (start, end) = self._ends[0], self._ends[-2:]
        rows, marks = self.rows[start:end], self._marks_of_step(-1)
        for number in range(1, times + 1):
            self.rows += _later_rows(rows, number * len(rows))
            self.marks += _marks(marks, -start - number * len(rows))
        self.log.renumber_posts(first, times * len(rows))


def _later_rows(rows: Sequence[EventRow], by: int) -> list[EventRow]:
    """The same events, ``by`` later in the program: only what is waited for has another number."""
    return [(*row[:-1], row[-1] + by) if row[0] == WAIT else row for row in rows]


class _MessageRecord:
    """The counts of communication."""

    def __init__(self, meter: CommunicationMeter):
        self.meter = meter
        self._ends = [dict(meter.counts)]

    def end_step(self) -> None:
        self._ends.append(dict(self.meter.counts))

    def _of_step(self, number: int) -> dict[Operation, int]:
        """What the step with that number was counted with; -1 is the last."""
        before, after = self._ends[number - 1 : number + 1 or None]
        return {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}

    def repeats(self) -> bool:
        return len(self._ends) > 2 and self._of_step(-1) == self._of_step(-2)

    def repeat(self, times: int) -> None:
        for operation, n in self._of_step(-1).items():
            self.meter.counts[operation] += n * times
