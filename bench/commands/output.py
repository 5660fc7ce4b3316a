"""What a command has found, as plain values that a form (:mod:`bench.commands.forms`) prints.

Nothing here imports torch, pandas or rich.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table for people.

    Attributes:
        lines: the values of each line by column, as they are shown; all lines have the same columns. None
            is shown as a blank.
    """

    title: str
    lines: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Output:
    """The outcome of a command.

    Attributes:
        sections: tables and paragraphs for people, in the order in which they are read.
        content: all of it for programs, in JSON's types; no infinities and no not-a-number.
        records: the main table for programs: one mapping from column to value for each line.
        columns: of ``records``; empty: those that the records have, in the order of their appearance.
        notes: remarks on the result, one a line.
        files: the files that the command wrote.
        code: the exit code.
    """

    sections: Sequence[Table | str] = ()
    content: Any = None
    records: Sequence[Mapping[str, Any]] = ()
    columns: Sequence[str] = ()
    notes: Sequence[str] = ()
    files: Sequence[Path] = ()
    code: int = 0

    def all_columns(self) -> list[str]:
        """The columns of ``records``, in order."""
        return list(self.columns or dict.fromkeys(name for record in self.records for name in record))
