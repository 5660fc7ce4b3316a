"""The result of a command, as plain values that a form (:mod:`command_line.forms`) prints; the table of
memory, which several commands show; and lines broken between words.

Nothing here imports torch, pandas or rich.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from spbench.bench.units import gib

#: between columns
GAP = "  "
#: between a number and its unit, where no line ends
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|[mu]?s|tokens)\b)")


def wrapped(text: str, width: int, indent: str = "", further: str | None = None) -> list[str]:
    """A text's lines, those that are longer than the width broken between words; a word that is longer stays
    whole, as do a number and its unit.

    Args:
        indent: before the first line of each of the text's.
        further: before the lines that continue one; None: as far as the line is indented itself, or as what
            comes after its first gap of two spaces.
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
    """A text as it is written to a stream: broken between words where that is a terminal."""
    return "\n".join(wrapped(text, shutil.get_terminal_size().columns)) if stream.isatty() else text


@dataclass(frozen=True)
class Column:
    """A column of a table, in all forms: people read ``name`` above values as ``shown`` writes them, programs
    read the bare values by ``field``.

    Attributes:
        name: for people, with the unit if the values have none: "peak GiB".
        field: the name of the value for programs, with its unit: "peak_memory_bytes".
        shown: writes a value for people, such as :func:`units.gib`; None is a blank.
        of: takes the value out of an item; None: its attribute, or its key, ``field``.
    """

    name: str
    field: str
    shown: Callable[[Any], Any] | None = None
    of: Callable[[Any], Any] | None = None

    def value(self, item: Any) -> Any:
        """The bare value of an item."""
        if self.of is not None:
            return self.of(item)
        return item.get(self.field) if isinstance(item, Mapping) else getattr(item, self.field)

    def text(self, item: Any) -> Any:
        """The value of an item for people."""
        value = self.value(item)
        return value if self.shown is None or value is None else self.shown(value)


def records(columns: Sequence[Column], items: Iterable[Any]) -> list[dict[str, Any]]:
    """The items for programs: the bare values of each by the columns' fields."""
    return [{column.field: column.value(item) for column in columns} for item in items]


@dataclass(frozen=True)
class Table:
    """A table for people. A terminal shows as much of it as has room, with no word broken and no row wrapped;
    elsewhere all of it is printed.

    Attributes:
        lines: the values of each line by column, as they are shown; all lines have the same columns. None
            is shown as a blank.
        important: columns in the order in which a terminal gives them room; those that are not named follow
            as the lines have them. Columns that get no room are named below the table.
        below: columns of sentences. One without room for its longest stands below its row.
        folded: what a terminal says in the place of a line, by its index; lines of which the same is said are
            counted.
        most: lines that a terminal shows, the first ones; None: all.
    """

    title: str
    lines: Sequence[Mapping[str, Any]]
    important: Sequence[str] = ()
    below: Sequence[str] = ()
    folded: Mapping[int, str] = field(default_factory=dict)
    most: int | None = None

    @classmethod
    def of(cls, title: str, columns: Sequence[Column], items: Iterable[Any], **further: Any) -> Table:
        """A line for each item, with these columns; ``further`` as the attributes."""
        return cls(
            title, [{column.name: column.text(item) for column in columns} for item in items], **further
        )


class Verbatim(str):
    """A section that is the text of a file, which people copy: its lines are never broken."""


@dataclass(frozen=True)
class View:
    """How much of an output a person at a terminal asks to see.

    Attributes:
        wide: all columns of tables, those without room in lines below each row.
        details: all sections, and all lines of tables.
    """

    wide: bool = False
    details: bool = False


@dataclass(frozen=True)
class Output:
    """The outcome of a command.

    Attributes:
        sections: tables and paragraphs for people, in the order in which they are read.
        details: further ones, which a terminal shows if they are asked for.
        content: all of it for programs, in JSON's types; no infinities and no not-a-number.
        records: the main table for programs: one mapping from column to value for each line.
        columns: of ``records``; empty: those that the records have, in the order of their appearance.
        notes: remarks on the result, one a line; the verdict, if there is one, is the last.
        files: the files that the command wrote.
        code: the exit code.
        view: how much of it is shown on a terminal.
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

    def all_columns(self) -> list[str]:
        """The columns of ``records``, in order."""
        return list(self.columns or dict.fromkeys(name for record in self.records for name in record))


def _held(entry: Mapping[str, Any]) -> str:
    held = sorted(entry["peak_held"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {gib(nbytes)}" for name, nbytes in held)


#: columns of the entries of :attr:`Measurement.by_class`, with the ``cell`` if there are several
_COLUMNS = (
    Column("cell", "cell"),
    Column("rank", "rank"),
    Column("ranks alike", "ranks"),
    Column("stage", "stage"),
    Column("step", "step"),
    Column("fits", "status", lambda status: "yes" if status == "ok" else "no"),
    Column("peak GiB", "peak_memory_bytes", gib),
    Column("in", "peak_phase"),
    Column("reserved GiB", "reserved_memory_bytes", gib),
    Column("at the end GiB", "allocated_bytes", gib),
    Column("returned GiB", "returned_bytes", gib),
    Column("on the host GiB", "host_memory_bytes", gib),
    Column("held at the peak (GiB)", "peak_held", of=_held),
)
_IMPORTANT = ("rank", "stage", "step", "fits", "peak GiB", "reserved GiB", "in")


def memory_table(measured: Mapping[str, Mapping[str, Any]]) -> Table | str:
    """A table of memory: for each class of ranks that run the same program, a line for the set-up (step 0)
    and for each traced step; a sentence if no cell has classes.

    Args:
        measured: measurements as rows have them, by the key of their cell.
    """
    entries = []
    for key, measurement in measured.items():
        classes = measurement.get("by_class") or ()
        alike: dict[str, Any] = {} if any(entry["stage"] for entry in classes) else {"stage": None}
        entries += [{"cell": key if len(measured) > 1 else None, **entry, **alike} for entry in classes]
    if not entries:
        return "No cell has the memory of its rank classes: meters count it on virtual ranks and on CPUs."
    usable = {measurement.get("usable_memory_bytes") for measurement in measured.values()}
    only = next(iter(usable)) if len(usable) == 1 else None
    title = "Memory of each rank class at each step" + (f", of {gib(only)} GiB" if only else "")
    return Table.of(title, _COLUMNS, entries, important=_IMPORTANT, below=("cell", "held at the peak (GiB)"))
