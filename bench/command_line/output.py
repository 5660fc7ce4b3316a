"""The result of a command, as plain values that a form (:mod:`command_line.forms`) prints; and lines broken
between words.

This module imports neither torch nor pandas nor rich.
"""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

#: the blanks between columns
GAP = "  "
#: the blank between a number and its unit, where no line may end
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|[mu]?s|tokens)\b)")


def wrapped(text: str, width: int, indent: str = "", further: str | None = None) -> list[str]:
    """The lines of a text, with longer lines than ``width`` broken between words; a longer word stays whole,
    and a number and its unit stay together.

    Args:
        indent: blanks before each line of the text.
        further: blanks before lines that continue a broken line; None: as many as the broken line has, or so
            many that the text after its first gap of two blanks is aligned.
    """
    lines = []
    for line in text.splitlines():
        deeper = _hanging(line, width) if further is None else further
        lines += textwrap.wrap(
            _BEFORE_UNIT.sub("\x1f", line),
            width,
            initial_indent=indent,
            subsequent_indent=indent + deeper,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return [line.replace("\x1f", " ") for line in lines]


def _hanging(line: str, width: int) -> str:
    start = len(line) - len(line.lstrip())
    gap = line.find(GAP, start)
    if gap == -1:
        return " " * start
    after = gap + len(line[gap:]) - len(line[gap:].lstrip())
    return " " * (after if after <= width // 2 else start + 2)


def for_stream(text: str, stream: TextIO) -> str:
    """A text for a stream: on a terminal, long lines are broken between words."""
    return "\n".join(wrapped(text, shutil.get_terminal_size().columns)) if stream.isatty() else text


@dataclass(frozen=True)
class Table:
    """A table for people. A terminal shows the columns that have room, with no word broken and no row
    wrapped; elsewhere the whole table is printed.

    Attributes:
        lines: the values of each line by column; all lines have the same columns. None is shown as a blank.
        important: columns in the order in which a terminal gives them room; other columns follow in the order
            of the lines. Columns that get no room are named below the table.
        below: columns of sentences; a sentence that has no room in its row is printed below the row.
        folded: the text that a terminal prints instead of a line, by the line's index; lines with the same
            text are counted.
        most: the number of first lines that a terminal shows; None: all lines.
    """

    title: str
    lines: Sequence[Mapping[str, Any]]
    important: Sequence[str] = ()
    below: Sequence[str] = ()
    folded: Mapping[int, str] = field(default_factory=dict)
    most: int | None = None


class Verbatim(str):
    """A section whose lines are never broken, because people copy it into a file."""


@dataclass(frozen=True)
class View:
    """How much of an output a person at a terminal asks to see.

    Attributes:
        wide: show all columns of tables; columns without room are printed below each row.
        details: show all sections, and all lines of tables.
    """

    wide: bool = False
    details: bool = False


@dataclass(frozen=True)
class Output:
    """The outcome of a command.

    Attributes:
        sections: tables and paragraphs for people, in the order in which they are read.
        details: further tables and paragraphs, which a terminal shows only with --details.
        content: the whole outcome for programs, in JSON's types, without infinities and NaN.
        records: the main table for programs: one mapping from column to value for each line.
        columns: the columns of ``records``; empty: all columns that the records have, in order.
        notes: remarks on the outcome, one a line; the verdict, if there is one, is the last.
        files: the files that the command wrote.
        code: the exit code.
        view: how much of the outcome a terminal shows.
    """

    sections: Sequence[Table | str] = ()
    content: Any = None
    records: Sequence[Mapping[str, Any]] = ()
    columns: Sequence[str] = ()
    notes: Sequence[str] = ()
    files: Sequence[Path] = ()
    code: int = 0
    details: Sequence[Table | str] = ()
    view: View = View()
