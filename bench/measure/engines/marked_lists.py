"""Lists of a trace with what is marked in them, and what those of two models say of that of a deeper one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spbench.bench.measure.engines.repeating_runs import Deepened, Entries

#: of words (phases, tags, workspaces) numbers by which those of two lists are compared
_NUMBERS: dict[str | None, int] = {None: 0}


def numbered(words: Iterable[str | None]) -> np.ndarray:
    return np.array([_NUMBERS.setdefault(word, len(_NUMBERS)) for word in words], dtype=np.int64)


def _tokens(columns: Sequence[np.ndarray]) -> np.ndarray:
    """[rows]: numbers of 64 bits, which are equal where the rows of these columns are."""
    tokens = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        whole = column if column.dtype == np.float64 else column.astype(np.int64)
        tokens = (tokens ^ whole.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        tokens ^= tokens >> np.uint64(32)
    return tokens


class MarkedList:
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
        self.words[self.is_mark] = numbered(word for word, _ in in_order)
        place = np.flatnonzero(~self.is_mark)
        there = np.full(len(self.source), -1)
        there[place] = np.where(references < 0, -1, place[references])
        whole = [np.zeros(len(self.source), dtype=column.dtype) for column in columns]
        for column, given in zip(whole, columns, strict=True):
            column[place] = given
        self.entries = Entries(_tokens([self.is_mark, self.words, *whole]), there)


class DeepList:
    """Two lists, and what they say of that of a deeper model. Errors are those of :class:`Deepened`."""

    def __init__(self, shallow: MarkedList, deeper: MarkedList):
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
