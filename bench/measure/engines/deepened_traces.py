"""The trace of a deep model, put together from those of two shallow ones.

Each list of a trace is aligned by itself (:mod:`measure.engines.repeating_runs`). Two things may always
grow with the number of layers: what an operator that takes lists of tensors reads and writes, as an
optimizer's does, and the host's work. A buffer or a message of all layers may where the backend says that its
cuts do not depend on how many there are (:meth:`Backend.cuts`), outside forward and backward alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from spbench.bench.measure.engines.listed import (
    NotAlike,
    columns_of,
    listed_log,
    listed_program,
    log_in_order,
    program_in_order,
)
from spbench.bench.measure.engines.repeating_runs import DeepList
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.simulator.program import Program
from spbench.bench.measure.trace.communication import CommunicationMeter
from spbench.bench.measure.trace.memory_log import MemoryLog

#: how operators begin that take lists of tensors, of which a deeper model has longer ones
_OF_LISTS = ("_foreach_", "_fused_")
#: the phases whose buffers do not grow with the number of layers
_OF_LAYERS = ("forward", "backward")
#: what stands for a number that grows
_GROWS = -1
#: the most that a column of :attr:`Program.host` can be
_MOST_HOST_WORK = 2**15 - 1


def _outside(marks: Sequence[tuple[str, int]], length: int) -> np.ndarray:
    """[length]: whether each entry of a list is outside forward and backward."""
    first = [0, *(start for _, start in marks), length]
    outside = [True, *(name not in _OF_LAYERS for name, _ in marks)]
    return np.repeat(outside, np.diff(first))


def _without_what_grows(columns: Sequence[np.ndarray], may: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Two columns with _GROWS for the numbers of one that the other has not, where entries ``may`` grow."""
    return [
        np.where(here & ~np.isin(column, other[there]), _GROWS, column)
        for column, other, here, there in zip(columns, columns[::-1], may, may[::-1], strict=True)
    ]


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
        self._log = deeper
        logs = shallow, deeper
        events = [np.asarray(log.events, dtype=np.int64) for log in logs]
        # of each event, the bytes of its storage, and whether it was made where it may grow
        pairs = [*zip(logs, events, strict=True)]
        sizes = [np.asarray(log.sizes, dtype=np.int64)[np.abs(each) - 1] for log, each in pairs]
        may = [grows & _outside(log.marks, len(each))[each > 0][np.abs(each) - 1] for log, each in pairs]
        alike = _without_what_grows(sizes, may)
        self._list = DeepList(
            *(listed_log(log, each, log.ends) for log, each in zip(logs, alike, strict=True))
        )
        # of each storage, by its number
        self._growth = np.zeros(len(deeper.sizes))
        born = events[1] > 0
        self._growth[events[1][born] - 1] = self._list.growth(*sizes)[born]

    def by(self, layers: int) -> MemoryLog:
        sizes = _grown(np.asarray(self._log.sizes, dtype=np.int64), self._growth, layers)
        return log_in_order(self._log, self._list.by(layers), sizes)


class _DeepProgram:
    """The program of a deeper model."""

    def __init__(self, shallow: Program, deeper: Program, grows: bool):
        self._program = deeper
        columns = columns_of(deeper)
        others = [each.name for each in fields(Program) if each.name not in {*columns, "marks"}]
        if any(getattr(shallow, name) != getattr(deeper, name) for name in others):
            raise NotAlike("a deeper model calls other operators, or communicates in other groups")
        programs = shallow, deeper
        may = [grows & _outside(program.marks, len(program)) for program in programs]
        pairs = {name: [getattr(each, name) for each in programs] for name in ("nbytes", "flops", "host")}
        alike = {name: _without_what_grows(pairs[name], may) for name in ("nbytes", "flops")}
        lists = []
        for number, program in enumerate(programs):
            of_lists = np.array([name.startswith(_OF_LISTS) for name in program.names], dtype=bool)
            takes_lists = of_lists[program.name]
            amounts = {name: np.where(takes_lists, _GROWS, both[number]) for name, both in alike.items()}
            lists.append(listed_program(program, **amounts))
        self._list = DeepList(*lists)
        self._growth = {name: self._list.growth(*pair) for name, pair in pairs.items()}

    def by(self, layers: int) -> Program:
        grown = {}
        for name, growth in self._growth.items():
            column = getattr(self._program, name)
            wide = _grown(column.astype(np.float64), growth, layers)
            if name == "host" and (wide > _MOST_HOST_WORK).any():
                raise NotAlike("the host does more between two events than a program can have")
            grown[name] = wide.astype(column.dtype)
        return program_in_order(self._program, self._list.by(layers), **grown)


class _DeepCounts:
    """The counts of communication of a deeper model."""

    def __init__(self, shallow: CommunicationMeter, deeper: CommunicationMeter, grows: bool):
        self._shallow, self._deeper = shallow, deeper
        alike = len(shallow.counts) == len(deeper.counts) and shallow.axes == deeper.axes
        for a, b in zip(shallow.counts, deeper.counts, strict=False):
            may = grows and b.phase not in _OF_LAYERS
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
