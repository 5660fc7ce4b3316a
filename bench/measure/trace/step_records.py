"""The records that consecutive steps of a loop with one key write into the meters; see
:mod:`measure.trace.repeated_steps`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from spbench.bench.measure.simulator.program import Kind
from spbench.bench.measure.trace.event_log import EventLog
from spbench.bench.measure.trace.memory import MemoryMeter
from spbench.bench.measure.trace.meter import CommunicationMeter, Operation
from spbench.bench.measure.trace.torch_internals import FakeTensor, fake_like, is_shared

Item = TypeVar("Item")


class StepRecord(Protocol):
    """The record of a meter's entries during consecutive steps with one key."""

    def end_step(self) -> None:
        """Note that a step has ended."""

    def repeats(self) -> bool:
        """Whether the last two steps wrote equal entries, and left equal storages or messages unfinished."""

    def repeat(self, times: int) -> None:
        """Write the last step's entries ``times`` times more; called only if :meth:`repeats` is true."""


class _Column(Generic[Item]):
    """The items that the steps have appended to one list of a meter.

    Args:
        items: the list, which belongs to the meter.
        later: returns copies of items in which numbers are larger by an amount; None: items have no numbers.

    Attributes:
        ends: the length of the list at the start of the first step and at the end of each step.
    """

    def __init__(self, items: list[Item], later: Callable[[Sequence[Item], int], list[Item]] | None = None):
        self.items, self.later, self.ends = items, later, [len(items)]

    def end_step(self) -> None:
        self.ends.append(len(self.items))

    def of_step(self, number: int) -> list[Item]:
        """The items that the step with that number has appended; -1 is the last step."""
        first, end = self.ends[number - 1 : number + 1 or None]
        return self.items[first:end]

    @property
    def grown(self) -> int:
        """The number of items that the last step has appended."""
        return self.ends[-1] - self.ends[-2]

    def repeats(self, by: int = 0) -> bool:
        """Whether the last step appended the same items as the step before, with numbers larger by ``by``."""
        before = self.of_step(-2)
        return self.of_step(-1) == (before if self.later is None else self.later(before, by))

    def repeat(self, times: int, by: int = 0) -> None:
        """Append the last step's items ``times`` times more, each time with numbers larger by ``by``."""
        last = self.of_step(-1)
        for number in range(1, times + 1):
            self.items += last if self.later is None else self.later(last, number * by)


def _later_marks(marks: Sequence[tuple[Any, int]], by: int) -> list[tuple[Any, int]]:
    """The same pairs of a mark and the event at which it begins, ``by`` events later."""
    return [(what, first + by) for what, first in marks]


class _Unfinished:
    """The numbers of storages (or posts) that began during the steps with one key and have not ended."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._before: set[int] = set()

    def end_step(self, began_or_ended: Iterable[tuple[int, bool]]) -> None:
        """Note a step's (number, whether the storage or post with this number began or ended), in order."""
        self._before = set(self.numbers)
        for number, began in began_or_ended:
            (self.numbers.add if began else self.numbers.discard)(number)

    def is_that_of_the_step_before(self, by: int) -> bool:
        """Whether the last two steps left the same numbers unfinished, but for a distance of ``by``."""
        same_number = len(self._before) == len(self.numbers)
        return same_number and self.numbers == {number + by for number in self._before}


class KeptTensors:
    """The tensors that the steps with one key append to a list; see ``kept`` of :func:`keyed_steps`.

    Attributes:
        tensors: the list, which belongs to the loop.
    """

    def __init__(self, tensors: list[Tensor], meter: MemoryMeter):
        self.tensors, self.meter = tensors, meter
        #: the storages' numbers at the start of the first step and at the end of each step; -1: not known
        self._ends = [self._numbers(tensors)]

    def _numbers(self, tensors: Sequence[Tensor]) -> list[int]:
        numbers = [self.meter.number(x.untyped_storage()) for x in tensors]
        return [-1 if number is None else number for number in numbers]

    def end_step(self) -> None:
        """Note the numbers of the list's storages at the end of a step."""
        self._ends.append(self._numbers(self.tensors))

    @property
    def numbers(self) -> set[int]:
        """The numbers of the storages of all tensors that the steps have appended."""
        return set(self._ends[-1][len(self._ends[0]) :])

    def repeats(self, born: int, births: int) -> bool:
        """Whether the last two steps appended the same number of tensors, each made by its step, while no
        other object refers to the tensors that earlier steps appended.

        Args:
            born: the number of the first storage that the last step made.
            births: the number of storages that the last step made, as did the step before.
        """
        taken_out = any(after[: len(before)] != before for before, after in pairwise(self._ends))
        if taken_out or -1 in self._ends[-1]:
            return False
        before, last = (after[len(start) :] for start, after in pairwise(self._ends[-3:]))
        earlier = self.tensors[len(self._ends[0]) : len(self._ends[-2])]
        return (
            last == [number + births for number in before]
            and len({*last}) == len(last)
            and all(number >= born for number in last)
            and all(type(x) is FakeTensor and not x.requires_grad for x in self.tensors[-len(last) :] if last)
            and not any(is_shared(x.untyped_storage()) for x in earlier)
        )

    def repeat(self, times: int, births: int) -> None:
        """Append copies of the last step's tensors ``times`` times more, and number all storages.

        The last step's tensors may also be held elsewhere. They stay the last in the list, as the tensors of
        the loop's last step would be; the copies for the steps between come before them.
        """
        *_, before, after = self._ends
        last = self.tensors[len(before) :]
        for x, number in zip(self.tensors, before, strict=False):
            self.meter.set_number(x.untyped_storage(), number)
        repeated = []
        for step in range(times):
            for x, number in zip(last, after[len(before) :], strict=True):
                assert isinstance(x, FakeTensor)
                nbytes = x.untyped_storage().nbytes()
                repeated.append(fake_like(x, torch.UntypedStorage(nbytes, device="meta")))
                self.meter.set_number(repeated[-1].untyped_storage(), number + step * births)
        self.tensors[len(before) : len(before)] = repeated


class StorageRecord:
    """The record of a memory meter: births, deaths and tags of storages."""

    def __init__(self, meter: MemoryMeter, kept: list[Tensor]):
        self.meter, self.log = meter, meter.log
        log = self.log
        #: one item for each storage
        self._sizes, self._streams, self._places = map(_Column[int], (log.sizes, log.streams, log.places))
        # births and deaths have the numbers of storages
        self._changes = _Column(
            log.events, lambda changes, by: [n + by if n > 0 else n - by for n in changes]
        )
        self._marks = _Column(log.marks, _later_marks)
        self._columns: list[_Column[Any]] = [
            *(self._sizes, self._streams, self._places, self._changes, self._marks)
        ]
        self._tagged = [len(log.tags)]
        self._kept, self._living = KeptTensors(kept, meter), _Unfinished()

    def end_step(self) -> None:
        changes = self.log.events[self._changes.ends[-1] :]
        self._kept.end_step()
        # a library's first matmul makes a workspace that lasts, in whatever step the matmul is
        lasting = self._kept.numbers.union(self.log.workspaces)
        self._living.end_step(
            (abs(change) - 1, change > 0) for change in changes if abs(change) - 1 not in lasting
        )
        for column in self._columns:
            column.end_step()
        self._tagged.append(len(self.log.tags))

    def repeats(self) -> bool:
        if len(self._tagged) < 3:
            return False
        first, *_, start, _ = self._sizes.ends
        births = self._sizes.grown
        return (
            self._sizes.repeats()
            and self._streams.repeats()
            and self._changes.repeats(births)
            and self._marks.repeats(self._changes.grown)
            and all(abs(change) > first for change in self._changes.of_step(-2))
            and self._living.is_that_of_the_step_before(births)
            and self._kept.repeats(start, births)
            and self._tags(-1) == self._tags(-2)
            and self._tagged_at_once(-1)
            and self._tagged_at_once(-2)
        )

    def _tags(self, step: int) -> list[str | None]:
        """The tags of the storages born in a step, in their order."""
        first, end = self._sizes.ends[step - 1 : step + 1 or None]
        return [self.log.tags.get(number) for number in range(first, end)]

    def _tagged_at_once(self, step: int) -> bool:
        """Whether a step tagged only storages that were born in the step."""
        before, after = self._tagged[step - 1 : step + 1 or None]
        return after - before == sum(tag is not None for tag in self._tags(step))

    def repeat(self, times: int) -> None:
        first, *_, end = self._sizes.ends
        births, changes, tags = self._sizes.grown, self._changes.grown, self._tags(-1)
        for column in (self._sizes, self._streams, self._places):
            column.repeat(times)
        self._changes.repeat(times, births)
        self._marks.repeat(times, changes)
        for place, tag in enumerate(tags):
            if tag is not None:
                again = range(end + place, end + place + times * births, births)
                self.log.tags |= dict.fromkeys(again, tag)
        self.meter.renumber(first, times * births)
        self._kept.repeat(times, births)


class EventRecord:
    """The record of an event log: the program's events, and the changes of stream, phase and ranks."""

    def __init__(self, log: EventLog):
        self.log, builder = log, log.builder
        # of the rows only waits have numbers of events
        self._rows = _Column(
            builder.rows, lambda rows, by: [(*r[:-1], r[-1] + by) if r[0] == Kind.WAIT else r for r in rows]
        )
        noted: tuple[list[tuple[Any, int]], ...] = (builder.marks, builder.switches, builder.works)
        self._noted = [_Column(each, _later_marks) for each in noted]
        self._columns: list[_Column[Any]] = [self._rows, *self._noted]
        self._posted = _Unfinished()

    def end_step(self) -> None:
        self._posted.end_step(self._posts_and_waits(self._rows.ends[-1]))
        for column in self._columns:
            column.end_step()

    def _posts_and_waits(self, start: int) -> Iterator[tuple[int, bool]]:
        for event, row in enumerate(self._rows.items[start:], start):
            if row[0] == Kind.WAIT:
                yield row[-1], False
            elif row[0] not in (Kind.KERNEL, Kind.RECORD):
                yield event, True

    def repeats(self) -> bool:
        if len(self._rows.ends) < 3:
            return False
        first, length = self._rows.ends[0], self._rows.grown
        return (
            self._rows.repeats(length)
            and all(row[-1] >= first for row in self._rows.of_step(-2) if row[0] == Kind.WAIT)
            and all(each.repeats(length) for each in self._noted)
            and not any(event.number >= first for event in self.log.streams.events)
            and self._posted.is_that_of_the_step_before(length)
        )

    def repeat(self, times: int) -> None:
        length = self._rows.grown
        for column in self._columns:
            column.repeat(times, length)
        self.log.renumber_posts(self._rows.ends[0], times * length)


class MessageRecord:
    """The record of a communication meter: its operations and their counts."""

    def __init__(self, meter: CommunicationMeter):
        self.meter = meter
        self._calls = _Column[Operation](meter.calls)

    def end_step(self) -> None:
        self._calls.end_step()

    def repeats(self) -> bool:
        return len(self._calls.ends) > 2 and self._calls.repeats()

    def repeat(self, times: int) -> None:
        for operation in self._calls.of_step(-1):
            self.meter.counts[operation] += times
        self._calls.repeat(times)
