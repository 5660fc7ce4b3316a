"""What consecutive steps of one key have written into the meters; see
:mod:`measure.trace.repeated_steps`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from spbench.bench.measure.simulator.program import KERNEL, RECORD, WAIT
from spbench.bench.measure.simulator.program_builder import EventRow
from spbench.bench.measure.trace.communication import CommunicationMeter, Operation
from spbench.bench.measure.trace.event_log import EventLog
from spbench.bench.measure.trace.kept_tensors import KeptTensors
from spbench.bench.measure.trace.memory import MemoryMeter


class Record(Protocol):
    """What a meter has written during consecutive steps of one key."""

    def end_step(self) -> None:
        """Note that a step has ended."""

    def repeats(self) -> bool:
        """Whether the last two steps wrote the same, and left the same behind."""

    def repeat(self, times: int) -> None:
        """Write the last step down that many times more; asked for where :meth:`repeats` is true."""


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


class StorageRecord:
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
            and self.log.streams[a.births : b.births] == self.log.streams[b.births : c.births]
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
        for of_storages in (log.sizes, log.places, log.streams):
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


def _marks(marks: Sequence[tuple[Any, int]], start: int) -> list[tuple[Any, int]]:
    """What began, with its first event counted from ``start``."""
    return [(what, first - start) for what, first in marks]


class _Changes:
    """What a program notes as (what begins, its first event): phases, and streams."""

    def __init__(self, noted: list[tuple[Any, int]]):
        self._noted, self._ends = noted, [len(noted)]

    def end_step(self) -> None:
        self._ends.append(len(self._noted))

    def of_step(self, number: int, start: int) -> list[tuple[Any, int]]:
        """What began in the step with that number, counted from its ``start``; -1 is the last."""
        first, end = self._ends[number - 1 : number + 1 or None]
        return _marks(self._noted[first:end], start)

    def repeat(self, times: int, start: int, length: int) -> None:
        """Note what began in the last step, from ``start`` on, again after each ``length`` events."""
        last = self.of_step(-1, start)
        for number in range(1, times + 1):
            self._noted += _marks(last, -start - number * length)


class EventRecord:
    """The events of the program, its streams and its phases."""

    def __init__(self, log: EventLog):
        self.log, self.rows = log, log.builder.rows
        self._ends = [len(self.rows)]
        builder = log.builder
        self._changes = [_Changes(noted) for noted in (builder.marks, builder.switches, builder.works)]
        self._posted = _Unfinished()

    def end_step(self) -> None:
        self._posted.end_step(self._posts_and_waits(self._ends[-1]))
        self._ends.append(len(self.rows))
        for changes in self._changes:
            changes.end_step()

    def _posts_and_waits(self, start: int) -> Iterator[tuple[int, bool]]:
        for event, row in enumerate(self.rows[start:], start):
            if row[0] == WAIT:
                yield row[-1], False
            elif row[0] not in (KERNEL, RECORD):
                yield event, True

    def repeats(self) -> bool:
        if len(self._ends) < 3:
            return False
        first, (a, b, c) = self._ends[0], self._ends[-3:]
        before = self.rows[a:b]
        return (
            self.rows[b:c] == _later_rows(before, c - b)
            and all(row[-1] >= first for row in before if row[0] == WAIT)
            and all(changes.of_step(-1, b) == changes.of_step(-2, a) for changes in self._changes)
            and not self.log.streams.holds_points(first)
            and self._posted.is_that_of_the_step_before(c - b)
        )

    def repeat(self, times: int) -> None:
        first, (start, end) = self._ends[0], self._ends[-2:]
        rows = self.rows[start:end]
        for number in range(1, times + 1):
            self.rows += _later_rows(rows, number * len(rows))
        for changes in self._changes:
            changes.repeat(times, start, len(rows))
        self.log.renumber_posts(first, times * len(rows))


def _later_rows(rows: Sequence[EventRow], by: int) -> list[EventRow]:
    """The same events, ``by`` later in the program: only what is waited for has another number."""
    return [(*row[:-1], row[-1] + by) if row[0] == WAIT else row for row in rows]


class MessageRecord:
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
