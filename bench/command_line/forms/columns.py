"""The columns of a table: which have values, which are of numbers, and which have room in a width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.command_line.output import Table, View
from spbench.bench.command_line.wrapping import GAP

#: characters that a sentence has at the least where it is broken within its column
_NARROW = 28


def text_of(value: Any) -> str:
    """A value as it is shown: None is a blank, and what would steer a terminal a question mark."""
    text = "" if value is None else str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def filled(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that have a value in some line, in order."""
    return [name for name in (lines[0] if lines else ()) if any(text_of(line[name]) for line in lines)]


def is_number(lines: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether a column is aligned as one of numbers: each value is one, or a blank."""
    return all(_is_number(line[name]) for line in lines)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip("+-%x,.0123456789") == ""
    return isinstance(value, (int, float, type(None)))


@dataclass(frozen=True)
class TableLayout:
    """What of a table has room.

    Attributes:
        lines: those that are shown.
        same: the columns that have one value in all of them, which is said once.
        beside: the columns of the rows, in order, with their widths in characters; a value that is longer is
            broken between words.
        below: the sentences that stand below each row, a line each.
        joined: further columns that stand below each row, in one line.
        left_out: the columns that are not shown.
        folded: how many lines have been left out for each of the texts in their place.
        cut: lines left out as there are too many.
    """

    lines: Sequence[Mapping[str, Any]]
    same: Mapping[str, str]
    beside: Mapping[str, int]
    below: Sequence[str]
    joined: Sequence[str]
    left_out: Sequence[str]
    folded: Mapping[str, int]
    cut: int


def layout(table: Table, width: int, view: View) -> TableLayout:
    """Fit a table to a width in characters: the important columns get room first, each as wide as its longest
    value and the longest word of its name."""
    kept, folded = _kept(table, view)
    lines = kept if view.details or table.most is None else kept[: table.most]
    names = filled(lines)
    same = {name: text_of(lines[0][name]) for name in names if name and _is_same(lines, name)}
    if len(lines) < 2 or len(same) == len(names):
        same = {}
    names = [name for name in names if name not in same]
    beside = _with_room(table, lines, names, width)
    others = [name for name in names if name not in beside]
    # what names a row is not left out
    first = next(iter(_by_importance(table, names)), None)
    below = [name for name in others if name in table.below or name == first]
    rest = [name for name in others if name not in below]
    joined, left_out = (rest, []) if view.wide else ([], rest)
    return TableLayout(lines, same, beside, below, joined, left_out, folded, len(kept) - len(lines))


def _kept(table: Table, view: View) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """The lines that have rows of their own, and the counts of the others by what is said of them."""
    if view.details:
        return list(table.lines), {}
    folded: dict[str, int] = {}
    for text in table.folded.values():
        folded[text] = folded.get(text, 0) + 1
    return [line for index, line in enumerate(table.lines) if index not in table.folded], folded


def _is_same(lines: Sequence[Mapping[str, Any]], name: str) -> bool:
    return len({text_of(line[name]) for line in lines}) == 1


def _by_importance(table: Table, names: Sequence[str]) -> list[str]:
    """The columns, sentences last where nothing else is said."""
    order = [*table.important, *(name for name in names if name not in table.below), *names]
    return [name for name in dict.fromkeys(order) if name in names]


def _with_room(
    table: Table, lines: Sequence[Mapping[str, Any]], names: Sequence[str], width: int
) -> dict[str, int]:
    """The columns of a row with their widths. A sentence that most rows have is broken within the room that
    is left, if there is some; otherwise what is left goes to names of several words."""
    taken: dict[str, int] = {}
    left = width + len(GAP)
    for name in _by_importance(table, names):
        texts = [text_of(line[name]) for line in lines]
        needed = max([*map(len, texts), *map(len, name.split())])
        narrow = max([_NARROW, *(len(word) for text in texts for word in text.split())])
        is_usual = sum(map(bool, texts)) > len(texts) / 2
        if name in table.below and is_usual and needed + len(GAP) > left >= narrow + len(GAP):
            needed = left - len(GAP)
        if needed + len(GAP) <= left:
            taken[name] = needed
            left -= needed + len(GAP)
    for name in taken:
        more = max(len(name) - taken[name], 0)
        if more <= left:
            taken[name] += more
            left -= more
    return {name: taken[name] for name in names if name in taken}
