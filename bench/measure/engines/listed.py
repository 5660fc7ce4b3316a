"""The lists of a trace, whose entries refer to each other, and lists in another order made of their entries.

A memory log and a program are lists whose entries refer to earlier entries: the death of a storage to its
birth, a wait to the communication that it waits for. Marks in the lists show where phases begin. A trace that
is put together from smaller traces (of fewer layers, or of stages with other micro-batches) has such lists
too. There each entry is a copy of a traced entry, and refers to a copy of the entry that this one refers to.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np

from spbench.bench.measure.simulator.program import Kind, Program
from spbench.bench.measure.trace.memory_log import MemoryLog

#: a number for each word (phase, tag, workspace), so that the words of two lists compare as integers
_NUMBERS: dict[str | None, int] = {None: 0}
#: (the name of a phase that begins, or None where a step has ended; the first entry after the mark)
Mark = tuple[str | None, int]


class NotAlike(ValueError):
    """The traced lists do not determine the list to be put together."""


class Order(NamedTuple):
    """A new list, as copies of the entries of an old list in another order.

    Attributes:
        source: [entries]: for each new entry, the old entry of which it is a copy.
        references: [entries]: for each new entry, the new entry that it refers to; -1: none.
        marks: the marks of the new list, in order.
    """

    source: np.ndarray
    references: np.ndarray
    marks: list[Mark]


@dataclass(frozen=True)
class Listed:
    """A list whose marks are entries of their own.

    Attributes:
        tokens: [entries]: a hash of each entry without its reference; like entries have equal tokens.
        references: [entries]: for each entry, the entry that it refers to; -1: none.
        source: [entries]: the place of each entry in the list without marks; -1 for a mark.
        words: [entries]: for a mark, the number of its word.
        targets: [entries]: whether other entries may refer to the entry.
    """

    tokens: np.ndarray
    references: np.ndarray
    source: np.ndarray
    words: np.ndarray
    targets: np.ndarray

    @classmethod
    def of(
        cls, columns: Sequence[np.ndarray], references: np.ndarray, marks: Iterable[Mark], targets: np.ndarray
    ) -> Self:
        """A list with these marks; marks at one entry stay in their order.

        Args:
            columns: each [length]: the values in which two like entries agree.
            references, targets: [length]: as the attributes, for a list without marks.
        """
        in_order = sorted(marks, key=lambda mark: mark[1])
        source = np.insert(np.arange(len(references)), [first for _, first in in_order], -1)
        is_mark = source < 0
        place = np.flatnonzero(~is_mark)
        words, there = np.zeros(len(source), dtype=np.int64), np.full(len(source), -1)
        words[is_mark] = _numbered(word for word, _ in in_order)
        there[place] = np.where(references < 0, -1, place[references])
        spread = [np.zeros(len(source), dtype=column.dtype) for column in columns]
        for wide, column in zip(spread, columns, strict=True):
            wide[place] = column
        may = np.zeros(len(source), dtype=bool)
        may[place] = targets
        return cls(_tokens([is_mark, words, *spread]), there, source, words, may)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_mark(self) -> np.ndarray:
        """[entries]: whether each entry is a mark."""
        return self.source < 0

    def words_of(self, entries: np.ndarray) -> list[str | None]:
        """The words of the marks at these places in the list."""
        by_number = [*_NUMBERS]
        return [by_number[number] for number in self.words[entries].tolist()]

    def order(self, like: np.ndarray, references: np.ndarray) -> Order:
        """The order of a list whose entries are copies of this list's entries.

        Args:
            like: [entries]: for each new entry, the entry of this list of which it is a copy.
            references: [entries]: for each new entry, the new entry that it refers to; -1: none.
        """
        is_mark = self.is_mark[like]
        number = np.cumsum(~is_mark) - ~is_mark
        marks = [*zip(self.words_of(like[is_mark]), number[is_mark].tolist(), strict=True)]
        references = references[~is_mark]
        return Order(self.source[like][~is_mark], np.where(references < 0, -1, number[references]), marks)


def _numbered(words: Iterable[str | None]) -> np.ndarray:
    return np.array([_NUMBERS.setdefault(word, len(_NUMBERS)) for word in words], dtype=np.int64)


def _tokens(columns: Sequence[np.ndarray]) -> np.ndarray:
    """[rows]: a hash of 64 bits for each row of the columns; equal rows have equal hashes."""
    tokens = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        wide = column if column.dtype == np.float64 else column.astype(np.int64)
        tokens = (tokens ^ wide.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        tokens ^= tokens >> np.uint64(32)
    return tokens


def listed_log(log: MemoryLog, sizes: np.ndarray, ends: Sequence[int]) -> Listed:
    """The births and deaths of a memory log, as a list whose deaths refer to births.

    Args:
        sizes: [events]: bytes of each event's storage; like events have equal bytes.
        ends: the first event after each traced step, which gets a mark.
    """
    events = np.asarray(log.events, dtype=np.int64)
    number, dies = np.abs(events) - 1, events < 0
    storages = range(len(log.sizes))
    of_storages = [
        np.asarray(log.streams or [0] * len(storages), dtype=np.int64),
        _numbered(map(log.tags.get, storages)),
        _numbered(map(log.workspaces.get, storages)),
    ]
    references = np.full(len(events), -1)
    references[dies] = np.flatnonzero(~dies)[number[dies]]
    columns = [dies, sizes, *(each[number] for each in of_storages)]
    # each step has the same phases, of which some may have no entry
    phases = len(log.marks) // len(ends) if ends else 0
    marks: list[Mark] = [
        mark
        for step, end in enumerate(ends)
        for mark in (*log.marks[step * phases : (step + 1) * phases], (None, end))
    ]
    return Listed.of(columns, references, [*marks, *log.marks[phases * len(ends) :]], ~dies)


def log_in_order(log: MemoryLog, order: Order, sizes: np.ndarray | None = None) -> MemoryLog:
    """The memory log whose events are copies of the events of ``log``, in another order.

    Args:
        sizes: [storages]: bytes of the storages of ``log``; None: ``log.sizes``.
    """
    events = np.asarray(log.events, dtype=np.int64)[order.source]
    born = events > 0
    number = np.cumsum(born) - 1
    like = events[born] - 1  # for each new storage, the storage of ``log`` of which it is a copy

    def of_storages(given: Sequence[int] | np.ndarray) -> list[int]:
        return np.asarray(given, dtype=np.int64)[like if len(given) else []].tolist()

    def named(given: Mapping[int, str]) -> dict[int, str]:
        has = np.zeros(len(log.sizes), dtype=bool)
        has[[*given]] = True
        some = np.flatnonzero(has[like])
        return dict(zip(some.tolist(), map(given.__getitem__, like[some].tolist()), strict=True))

    return MemoryLog(
        sizes=of_storages(log.sizes if sizes is None else sizes),
        events=np.where(born, number + 1, -number[order.references] - 1).tolist(),
        marks=[(word, first) for word, first in order.marks if word is not None],
        tags=named(log.tags),
        ends=[first for word, first in order.marks if word is None],
        workspaces=named(log.workspaces),
        streams=of_storages(log.streams),
        places=of_storages(log.places),
        place_names=log.place_names,
    )


def columns_of(program: Program) -> dict[str, np.ndarray]:
    """The arrays of a program with one row for each event, by the name of the field."""
    named = ((each.name, getattr(program, each.name)) for each in fields(Program))
    return {name: column for name, column in named if isinstance(column, np.ndarray)}


def listed_program(program: Program, **others: np.ndarray) -> Listed:
    """The events of a program, as a list whose waits refer to events; the host's work is not compared.

    Args:
        others: columns that take the place of the program's columns when events are compared.
    """
    waits = program.kind == Kind.WAIT
    columns = {**columns_of(program), **others, "partner": np.where(waits, -1, program.partner)}
    del columns["host"]
    flat = [each for column in columns.values() for each in column.reshape(len(column), -1).T]
    every = np.ones(len(program), dtype=bool)
    return Listed.of(flat, np.where(waits, program.partner, -1), program.marks, every)


def program_in_order(program: Program, order: Order, **others: np.ndarray) -> Program:
    """The program whose events are copies of the events of ``program``, in another order.

    Args:
        others: columns, by name, that take the place of the columns of ``program``.
    """
    columns: dict[str, Any] = {
        name: column[order.source] for name, column in {**columns_of(program), **others}.items()
    }
    columns["partner"] = np.where(columns["kind"] == Kind.WAIT, order.references, columns["partner"])
    return replace(program, **columns, marks=tuple((word or "", first) for word, first in order.marks))
