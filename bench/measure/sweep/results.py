"""Result rows: one a cell, appended to a JSONL file the moment the cell ends.

A row is written whole or not at all, by one write to a file opened for appending, then fsync; a part of a row
on a full disk is cut off again. A file that a crash or a person has spoilt loses only the spoilt lines.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.files import read_file
from spbench.bench.row import Row, WrongRow, json_line, parse_any_row, parse_row

#: the file of rows in the output folder of a run
RESULTS_FILE = "cells.jsonl"

#: the first bytes of a written row, even of one that was cut short
_BEGINNING = b'{"key":"'


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a results file, or of the one in a folder: each key's last row, in order of appearance.

    Returns the rows, none without a file, and a message for each line that is not a row, with the wrong
    field.

    Raises:
        UserError: the file cannot be read.
    """
    rows: dict[str, Row] = {}
    problems = []
    file = path / RESULTS_FILE if path.is_dir() and path.name != RESULTS_FILE else path
    for place, line in _lines(file):
        try:
            row = parse_row(line)
            rows[row.key] = row
        except WrongRow as error:
            problems.append(f"{place}: not a result row, skipped ({error})")
    return list(rows.values()), problems


def read_all_rows(path: Path) -> list[Row]:
    """The rows of a file in which every line must be a row.

    Raises:
        UserError: the file cannot be read, or a line is not a row; names the wrong field.
    """
    rows, problems = read_rows(path)
    if problems:
        raise UserError(problems[0].replace(", skipped", "; mend or remove the line"))
    return rows


def read_new_rows(path: Path) -> tuple[dict[str, Row], dict[str, list[str]]]:
    """The rows of a file by key, with NaN in place of numbers that are not finite; and the names of the
    fields that had such numbers, by key.

    Raises:
        UserError: the file cannot be read, or a line is not a row for another reason.
    """
    rows: dict[str, Row] = {}
    not_finite: dict[str, list[str]] = {}
    for place, line in _lines(path):
        try:
            row, fields = parse_any_row(line)
        except WrongRow as error:
            raise UserError(f"{place}: not a result row; mend or remove the line ({error})") from error
        rows[row.key], not_finite[row.key] = row, fields
    return rows, not_finite


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that are not blank, each as ("FILE:NUMBER", line); none without a file."""
    try:
        lines = read_file(path).split(b"\n")
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return
        raise
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path}:{number}", line


class ResultsFile(AbstractContextManager["ResultsFile"]):
    """The results file of an output folder, held open for appending by one sweep at a time.

    Args:
        folder: the output folder, made if need be.
        fresh: move earlier results aside (to cells.1.jsonl and so on) instead of going on with them.

    Attributes:
        rows: the last row of each key in the file; grows as rows are appended.
        problems: a line for each line of the file that was skipped.

    Raises:
        UserError: the folder cannot be written to, the file cannot be read or is not one of results, or
            another sweep holds it.
    """

    def __init__(self, folder: Path, *, fresh: bool = False):
        self.path = folder / RESULTS_FILE
        self.moved: Path | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
            if fresh and os.fstat(self._fd).st_size:
                self.moved = self._move_aside()
                os.close(self._fd)
                self._fd = self._open()
        except OSError as error:
            raise UserError(
                f"cannot write results to {self.path}: {error.strerror}; choose another --output"
            ) from error
        try:
            rows, self.problems = read_rows(self.path)
        except UserError:
            self.close()
            raise
        if self.problems and not rows and os.pread(self._fd, len(_BEGINNING), 0) != _BEGINNING:
            self.close()
            raise UserError(
                f"{self.path} is not a file of results (no line of it is a result row), so that nothing is "
                "written to it; choose another --output, or move the file"
            )
        self.rows: dict[str, Row] = {row.key: row for row in rows}
        size = os.fstat(self._fd).st_size
        self._unfinished = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, so that another sweep can have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def append(self, row: Row) -> None:
        """Write a row to the disk, and add it to ``rows``.

        Raises:
            UserError: the row cannot be written; earlier rows are unchanged.
        """
        line = json_line(row).encode()
        if self._unfinished and not self._cut_torn_row():
            line = b"\n" + line
        size = os.fstat(self._fd).st_size
        try:
            if (written := os.write(self._fd, line)) != len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes written, no space left")
            os.fsync(self._fd)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, size)
            raise UserError(
                f"cannot write to {self.path}: {error.strerror}; its earlier rows are whole, "
                "and the same command goes on from there"
            ) from error
        self._unfinished = False
        self.rows[row.key] = row

    def _open(self) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise UserError(
                f"another sweep is writing to {self.path}; wait for it or choose another --output"
            ) from error
        except OSError:
            pass  # a file system without locks
        return fd

    def _move_aside(self) -> Path:
        number = 1
        while (aside := self.path.with_suffix(f".{number}.jsonl")).exists():
            number += 1
        return self.path.rename(aside)

    def _cut_torn_row(self) -> bool:
        """Remove a row at the file's end that a crash has cut short, so that every line is whole again;
        returns whether there was such a row."""
        content = read_file(self.path)
        begins = content.rfind(b"\n") + 1
        try:
            parse_row(content[begins:])
        except WrongRow:
            if torn := content.startswith(_BEGINNING, begins):
                os.ftruncate(self._fd, begins)
            return torn
        return False
