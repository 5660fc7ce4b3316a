"""The trace of a deep model, put together from those of two shallow ones.

Each list of a trace is aligned by itself (:mod:`measure.engines.repeating_runs`). Two things may always
grow with the number of layers: what an operator that takes lists of tensors reads and writes, as an
optimizer's does, and the host's work. A buffer or a message of all layers may where the backend says that its
cuts do not depend on how many there are (:meth:`Backend.cuts`), outside forward and backward alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from spbench.bench.measure.engines.marked_lists import DeepList, MarkedList, numbered
from spbench.bench.measure.engines.pipeline_stages import OF_TURNS
from spbench.bench.measure.engines.repeating_runs import NotAlike
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.simulator.program import WAIT, Program
from spbench.bench.measure.trace.communication import CommunicationMeter
from spbench.bench.measure.trace.memory_log import MemoryLog

#: how operators begin that take lists of tensors, of which a deeper model has longer ones
_OF_LISTS = ("_foreach_", "_fused_")
#: what stands for a number that grows
_GROWS = -1
#: the most that a column of :attr:`Program.host` can be
_MOST_HOST_WORK = 2**15 - 1
#: what ends a traced step, among the phases that begin
_END = None


def _outside(marks: Sequence[tuple[str, int]], length: int) -> np.ndarray:
    """[length]: whether each entry of a list is outside forward and backward."""
    first = [0, *(start for _, start in marks), length]
    outside = [True, *(name not in OF_TURNS for name, _ in marks)]
    return np.repeat(outside, np.diff(first))


def _without_what_grows(
    shallow: np.ndarray, deeper: np.ndarray, may: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Two columns with _GROWS for the numbers of one that the other has not, where entries ``may`` grow."""
    columns = shallow, deeper
    others = deeper, shallow
    made = [
        np.where(each & ~np.isin(column, other[each_of_other]), _GROWS, column)
        for column, other, each, each_of_other in zip(columns, others, may, may[::-1], strict=True)
    ]
    return made[0], made[1]


def _grown(column: np.ndarray, by_two_layers: np.ndarray, layers: int) -> np.ndarray:
    """A column after its growth.

    Raises:
        NotAlike: a number would not be whole.
    """
    grown = column + by_two_layers * ((layers - 2) / 2)
    if (grown != np.rint(grown)).any():
        raise NotAlike("something does not grow by the same with each layer")
    return grown.astype(column.dtype)


class _DeepLog:
    """The memory log of a deeper model."""

    def __init__(self, shallow: MemoryLog, deeper: MemoryLog, grows: bool):
        if shallow.place_names != deeper.place_names:
            raise NotAlike("other modules are called in a deeper model")
        self._log, self._events = deeper, np.asarray(deeper.events, dtype=np.int64)
        logs = shallow, deeper
        # of each event, the bytes of its storage
        sizes = [
            np.asarray(log.sizes, dtype=np.int64)[np.abs(np.asarray(log.events, dtype=np.int64)) - 1]
            for log in logs
        ]
        may = [grows & self._made_outside(log) for log in logs]
        alike = _without_what_grows(sizes[0], sizes[1], (may[0], may[1]))
        self._list = DeepList(*(self._marked(log, each) for log, each in zip(logs, alike, strict=True)))
        # of each storage, by its number
        self._growth = np.zeros(len(deeper.sizes))
        born = self._events > 0
        self._growth[self._events[born] - 1] = self._list.growth(*sizes)[born]

    @staticmethod
    def _made_outside(log: MemoryLog) -> np.ndarray:
        """Of each event, whether its storage was made outside forward and backward."""
        events = np.asarray(log.events, dtype=np.int64)
        made = _outside(log.marks, len(events))[events > 0]
        return made[np.abs(events) - 1]

    @staticmethod
    def _marked(log: MemoryLog, sizes: np.ndarray) -> MarkedList:
        events = np.asarray(log.events, dtype=np.int64)
        number, dies = np.abs(events) - 1, events < 0
        born_at = np.flatnonzero(~dies)
        storages = range(len(log.sizes))
        of_storages = [
            np.asarray(log.streams or [0] * len(storages), dtype=np.int64),
            numbered(map(log.tags.get, storages)),
            numbered(map(log.workspaces.get, storages)),
        ]
        marks = [*((_END, end) for end in log.ends), *log.marks]
        references = np.full(len(events), -1)
        references[dies] = born_at[number[dies]]
        return MarkedList([dies, sizes, *(each[number] for each in of_storages)], references, marks)

    def by(self, layers: int) -> MemoryLog:
        source, references, marks = self._list.by(layers)
        events = self._events[source]
        born = events > 0
        number = np.cumsum(born) - 1
        like = events[born] - 1  # of each storage, the one that it is a copy of
        log = self._log

        def of_storages(given: Sequence[int]) -> np.ndarray:
            return np.asarray(given, dtype=np.int64)[like if given else []]

        def named(given: dict[int, str]) -> dict[int, str]:
            has = np.zeros(len(log.sizes), dtype=bool)
            has[[*given]] = True
            some = np.flatnonzero(has[like])
            return dict(zip(some.tolist(), map(given.__getitem__, like[some].tolist()), strict=True))

        sizes = np.asarray(log.sizes, dtype=np.int64)
        return MemoryLog(
            sizes=_grown(sizes, self._growth, layers)[like].tolist(),
            events=np.where(born, number + 1, -number[references] - 1).tolist(),
            marks=[(word, first) for word, first in marks if word is not _END],
            tags=named(log.tags),
            ends=[first for word, first in marks if word is _END],
            workspaces=named(log.workspaces),
            streams=of_storages(log.streams).tolist(),
            places=of_storages(log.places).tolist(),
            place_names=log.place_names,
        )


class _DeepProgram:
    """The program of a deeper model."""

    def __init__(self, shallow: Program, deeper: Program, grows: bool):
        self._program = deeper
        self._columns = {
            each.name: column
            for each in fields(Program)
            if isinstance(column := getattr(deeper, each.name), np.ndarray)
        }
        others = [each.name for each in fields(Program) if each.name not in {*self._columns, "marks"}]
        if any(getattr(shallow, name) != getattr(deeper, name) for name in others):
            raise NotAlike("a deeper model calls other operators, or communicates in other groups")
        programs = shallow, deeper
        may = [grows & _outside(program.marks, len(program)) for program in programs]
        amounts = {
            name: _without_what_grows(getattr(shallow, name), getattr(deeper, name), (may[0], may[1]))
            for name in ("nbytes", "flops")
        }
        self._list = DeepList(
            *(
                self._marked(program, {name: each[number] for name, each in amounts.items()})
                for number, program in enumerate(programs)
            )
        )
        self._growth = {
            name: self._list.growth(getattr(shallow, name), getattr(deeper, name))
            for name in (*amounts, "host")
        }

    def _marked(self, program: Program, amounts: dict[str, np.ndarray]) -> MarkedList:
        waits = program.kind == WAIT
        of_lists = np.array([name.startswith(_OF_LISTS) for name in program.names], dtype=bool)[program.name]
        columns = {
            **{name: getattr(program, name) for name in self._columns if name != "host"},
            **{name: np.where(of_lists, _GROWS, amount) for name, amount in amounts.items()},
            "partner": np.where(waits, -1, program.partner),
        }
        by_column = [each for column in columns.values() for each in column.reshape(len(column), -1).T]
        return MarkedList(by_column, np.where(waits, program.partner, -1), program.marks)

    def by(self, layers: int) -> Program:
        source, references, marks = self._list.by(layers)
        grown = {}
        for name, growth in self._growth.items():
            wide = _grown(self._columns[name].astype(np.float64), growth, layers)
            if name == "host" and (wide > _MOST_HOST_WORK).any():
                raise NotAlike("the host does more between two events than a program can have")
            grown[name] = wide.astype(self._columns[name].dtype)
        columns = {name: column[source] for name, column in (self._columns | grown).items()}
        partner = np.where(columns["kind"] == WAIT, references, columns["partner"])
        known: dict[str, Any] = {**columns, "partner": partner}
        return replace(self._program, **known, marks=tuple((word or "", first) for word, first in marks))


class _DeepCounts:
    """The counts of communication of a deeper model."""

    def __init__(self, shallow: CommunicationMeter, deeper: CommunicationMeter, grows: bool):
        self._shallow, self._deeper = shallow, deeper
        alike = len(shallow.counts) == len(deeper.counts) and shallow.axes == deeper.axes
        for a, b in zip(shallow.counts, deeper.counts, strict=False):
            may = grows and b.phase not in OF_TURNS
            alike = alike and a == (replace(b, payload_bytes=a.payload_bytes) if may else b)
        if not alike:
            raise NotAlike("a deeper model sends other messages")

    def by(self, layers: int) -> CommunicationMeter:
        made = CommunicationMeter(self._deeper.axes)
        made.current_phase = self._deeper.current_phase
        pairs = zip(self._shallow.counts.items(), self._deeper.counts.items(), strict=True)
        for (before, n), (which, more) in pairs:
            growth = np.array([which.payload_bytes - before.payload_bytes, more - n], dtype=np.float64)
            payload, count = _grown(np.array([which.payload_bytes, more]), growth, layers).tolist()
            made.counts[replace(which, payload_bytes=payload)] = count
        return made


class DeepTrace:
    """What the traces of two models say of that of a deeper one.

    Args:
        shallow, deeper: of models of n and n + 2 layers, or runs of layers that repeat.
        grows: whether buffers and messages of all layers may grow, outside forward and backward.

    Raises:
        NotAlike: they do not say it.
    """

    def __init__(self, shallow: Trace, deeper: Trace, *, grows: bool):
        self._trace = deeper
        self._memory = _DeepLog(shallow.memory, deeper.memory, grows)
        self._host_memory = _DeepLog(shallow.host_memory, deeper.host_memory, grows)
        self._counts = _DeepCounts(shallow.communication, deeper.communication, grows)
        self._program = None
        if shallow.program is not None and deeper.program is not None:
            self._program = _DeepProgram(shallow.program, deeper.program, grows)

    def by(self, layers: int) -> Trace:
        """The trace of a model with that many layers more than the shallower one.

        Raises:
            NotAlike: the two traces do not say it.
        """
        return replace(
            self._trace,
            memory=self._memory.by(layers),
            host_memory=self._host_memory.by(layers),
            communication=self._counts.by(layers),
            program=None if self._program is None else self._program.by(layers),
        )
