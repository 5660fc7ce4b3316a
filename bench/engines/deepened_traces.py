"""The trace of a deep model, put together from those of two shallow ones.

Each list of a trace is aligned by itself (:mod:`spbench.bench.engines.repeating_runs`). Two things may grow
with the number of layers: what an operator that takes lists of tensors reads and writes, as an optimizer's
does, and the host's work. Nothing else may: a buffer or a message of all layers has a size at which it is cut
or padded otherwise, and shallow models do not show which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import starmap
from typing import Any

import numpy as np

from spbench.bench.engines.repeating_runs import Deepened, Entries, NotAlike
from spbench.bench.engines.traces import Trace
from spbench.bench.meters.communication import CommunicationMeter
from spbench.bench.meters.memory_log import MemoryLog
from spbench.bench.simulator.program import WAIT, Program

#: how operators begin that take lists of tensors, of which a deeper model has longer ones
_OF_LISTS = ("_foreach_", "_fused_")
#: the most that a column of :attr:`Program.host` can be
_MOST_HOST_WORK = 2**15 - 1
#: what ends a traced step, among the phases that begin
_END = None

#: of words (phases, tags, workspaces) numbers by which those of two lists are compared
_NUMBERS: dict[str | None, int] = {None: 0}


def _numbered(words: Iterable[str | None]) -> np.ndarray:
    return np.array([_NUMBERS.setdefault(word, len(_NUMBERS)) for word in words], dtype=np.int64)


def _tokens(columns: Sequence[np.ndarray]) -> np.ndarray:
    """[rows]: numbers of 64 bits, which are equal where the rows of these columns are."""
    tokens = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        whole = column if column.dtype == np.float64 else column.astype(np.int64)
        tokens = (tokens ^ whole.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        tokens ^= tokens >> np.uint64(32)
    return tokens


class _Marked:
    """A list with what is marked in it as entries of its own.

    Args:
        columns: of [length], what two alike have in common.
        references: of each, the one that it refers to; -1: none.
        marks: (word, the first after it).

    Attributes:
        source: of each entry, its number in the list; -1: it is a mark.
    """

    def __init__(
        self,
        columns: Sequence[np.ndarray],
        references: np.ndarray,
        marks: Iterable[tuple[str | None, int]],
    ):
        in_order = sorted(marks, key=lambda mark: mark[1])
        self.source = np.insert(np.arange(len(references)), [first for _, first in in_order], -1)
        self.is_mark = self.source < 0
        self.words = np.zeros(len(self.source), dtype=np.int64)
        self.words[self.is_mark] = _numbered(word for word, _ in in_order)
        place = np.flatnonzero(~self.is_mark)
        there = np.full(len(self.source), -1)
        there[place] = np.where(references < 0, -1, place[references])
        whole = [np.zeros(len(self.source), dtype=column.dtype) for column in columns]
        for column, given in zip(whole, columns, strict=True):
            column[place] = given
        self.entries = Entries(_tokens([self.is_mark, self.words, *whole]), there)


class _DeepList:
    """Two lists with marks, and what they say of that of a deeper model."""

    def __init__(self, shallow: _Marked, deeper: _Marked):
        self._shallow, self._deeper = shallow, deeper
        self._whole = Deepened(shallow.entries, deeper.entries)

    def by(self, layers: int) -> tuple[np.ndarray, np.ndarray, list[tuple[str | None, int]]]:
        """See :meth:`Deepened.by`.

        Returns:
            (of each, the one of the deeper list that it is a copy of; what it refers to; marks)
        """
        like, references = self._whole.by(layers)
        is_mark = self._deeper.is_mark[like]
        number = np.cumsum(~is_mark) - ~is_mark
        by_number = [*_NUMBERS]
        marks = [
            (by_number[word], first)
            for word, first in zip(
                self._deeper.words[like][is_mark].tolist(), number[is_mark].tolist(), strict=True
            )
        ]
        references = references[~is_mark]
        references = np.where(references < 0, -1, number[references])
        return self._deeper.source[like][~is_mark], references, marks

    def growth(self, of_shallow: np.ndarray, of_deeper: np.ndarray) -> np.ndarray:
        """By how much a column of the list grows with two layers, for each row of the deeper one."""
        there = self._whole.counterpart
        both = (there >= 0) & ~self._deeper.is_mark
        row, row_there = self._deeper.source[both], self._shallow.source[there[both]]
        growth = np.zeros(of_deeper.shape, dtype=np.float64)
        growth[row] = of_deeper[row].astype(np.float64) - of_shallow[row_there]
        return growth


class _DeepLog:
    """The memory log of a deeper model."""

    def __init__(self, shallow: MemoryLog, deeper: MemoryLog):
        if shallow.place_names != deeper.place_names:
            raise NotAlike("other modules are called in a deeper model")
        self._log, self._events = deeper, np.asarray(deeper.events, dtype=np.int64)
        self._list = _DeepList(*map(self._marked, (shallow, deeper)))

    @staticmethod
    def _marked(log: MemoryLog) -> _Marked:
        events = np.asarray(log.events, dtype=np.int64)
        number, dies = np.abs(events) - 1, events < 0
        born_at = np.flatnonzero(~dies)
        storages = range(len(log.sizes))
        of_storages = [
            np.asarray(log.sizes, dtype=np.int64),
            np.asarray(log.streams or [0] * len(storages), dtype=np.int64),
            _numbered(map(log.tags.get, storages)),
            _numbered(map(log.workspaces.get, storages)),
        ]
        marks = [*((_END, end) for end in log.ends), *log.marks]
        references = np.full(len(events), -1)
        references[dies] = born_at[number[dies]]
        return _Marked([dies, *(each[number] for each in of_storages)], references, marks)

    def by(self, layers: int) -> MemoryLog:
        source, references, marks = self._list.by(layers)
        events = self._events[source]
        born = events > 0
        number = np.cumsum(born) - 1
        like = events[born] - 1  # of each storage, the one that it is a copy of

        def of_storages(given: Sequence[int]) -> list[int]:
            copied: list[int] = np.asarray(given, dtype=np.int64)[like].tolist() if given else []
            return copied

        def named(given: dict[int, str]) -> dict[int, str]:
            return {new: given[old] for new, old in enumerate(like.tolist()) if old in given} if given else {}

        log = self._log
        return MemoryLog(
            sizes=of_storages(log.sizes),
            events=np.where(born, number + 1, -number[references] - 1).tolist(),
            marks=[(word, first) for word, first in marks if word is not _END],
            tags=named(log.tags),
            ends=[first for word, first in marks if word is _END],
            workspaces=named(log.workspaces),
            streams=of_storages(log.streams),
            places=of_storages(log.places),
            place_names=log.place_names,
        )


class _DeepProgram:
    """The program of a deeper model."""

    def __init__(self, shallow: Program, deeper: Program):
        self._program = deeper
        self._columns = {
            each.name: column
            for each in fields(Program)
            if isinstance(column := getattr(deeper, each.name), np.ndarray)
        }
        others = [each.name for each in fields(Program) if each.name not in {*self._columns, "marks"}]
        if any(getattr(shallow, name) != getattr(deeper, name) for name in others):
            raise NotAlike("a deeper model calls other operators, or communicates in other groups")
        self._list = _DeepList(*map(self._marked, (shallow, deeper)))
        self._growth = {
            name: self._list.growth(getattr(shallow, name), getattr(deeper, name))
            for name in ("nbytes", "flops", "host")
        }

    def _marked(self, program: Program) -> _Marked:
        waits = program.kind == WAIT
        of_lists = np.array([name.startswith(_OF_LISTS) for name in program.names], dtype=bool)[program.name]
        columns = {
            **{name: getattr(program, name) for name in self._columns if name != "host"},
            "nbytes": np.where(of_lists, 0.0, program.nbytes),
            "flops": np.where(of_lists, 0.0, program.flops),
            "partner": np.where(waits, -1, program.partner),
        }
        by_column = [each for column in columns.values() for each in column.reshape(len(column), -1).T]
        return _Marked(by_column, np.where(waits, program.partner, -1), program.marks)

    def by(self, layers: int) -> Program:
        source, references, marks = self._list.by(layers)
        columns = {name: column[source] for name, column in self._columns.items()}
        for name, growth in self._growth.items():
            grown = columns[name] + growth[source] * ((layers - 2) / 2)
            if name == "host" and (grown > _MOST_HOST_WORK).any():
                raise NotAlike("the host does more between two events than a program can have")
            columns[name] = grown.astype(columns[name].dtype)
        partner = np.where(columns["kind"] == WAIT, references, columns["partner"])
        known: dict[str, Any] = {**columns, "partner": partner}
        return replace(self._program, **known, marks=tuple((word or "", first) for word, first in marks))


class _DeepCounts:
    """The counts of communication of a deeper model."""

    def __init__(self, shallow: CommunicationMeter, deeper: CommunicationMeter):
        if shallow.axes != deeper.axes or shallow.counts.keys() != deeper.counts.keys():
            raise NotAlike("a deeper model sends other messages")
        self._shallow, self._deeper = shallow, deeper

    def by(self, layers: int) -> CommunicationMeter:
        made = CommunicationMeter(self._deeper.axes)
        made.current_phase = self._deeper.current_phase
        before = self._shallow.counts
        made.counts = Counter(
            {which: n + (n - before[which]) * (layers - 2) // 2 for which, n in self._deeper.counts.items()}
        )
        return made


class DeepTrace:
    """What the traces of two models say of that of a deeper one.

    Args:
        shallow, deeper: of models of n and n + 2 layers, or runs of layers that repeat.

    Raises:
        NotAlike: they do not say it.
    """

    def __init__(self, shallow: Trace, deeper: Trace):
        self._trace = deeper
        pairs = (shallow.memory, deeper.memory), (shallow.host_memory, deeper.host_memory)
        self._memory, self._host_memory = starmap(_DeepLog, pairs)
        self._counts = _DeepCounts(shallow.communication, deeper.communication)
        self._program = None
        if shallow.program is not None and deeper.program is not None:
            self._program = _DeepProgram(shallow.program, deeper.program)

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
