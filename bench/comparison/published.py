"""Published numbers: data in CSV files, each with its source, read for comparison and nothing else."""

from __future__ import annotations

import csv
from importlib.resources import files
from pathlib import Path

from spbench.bench.errors import UserError, suggestion

PACKAGE = "spbench.results.papers"


def published_value(file: str, key: str, row: str, column: str, beside: Path) -> float:
    """The number that :func:`published_text` gives.

    Raises:
        UserError: there is no such file, row or column, or no number there.
    """
    text = published_text(file, key, row, column, beside)
    try:
        return float(text)
    except ValueError as error:
        raise UserError(f"{file}: {column} of {row!r} is not a number: {text!r}") from error


def published_text(file: str, key: str, row: str, column: str, beside: Path) -> str:
    """What stands in ``column`` of the row whose ``key`` is ``row``.

    Args:
        file: a CSV file in the folder ``beside``, or else one that comes with the package.

    Raises:
        UserError: there is no such file, row or column.
    """
    path, columns, rows = published_rows(file, beside)
    for name in (key, column):
        if name not in columns:
            raise UserError(f"{path}: no column {name!r}{suggestion(name, columns)}")
    found = [entry for entry in rows if entry[key] == row]
    if len(found) != 1:
        many = f"{len(found)} rows have" if found else "no row has"
        raise UserError(
            f"{path}: {many} {key} {row!r}{suggestion(row, [e[key] for e in rows]) if not found else ''}"
        )
    return found[0][column]


def published_rows(file: str, beside: Path) -> tuple[Path, list[str], list[dict[str, str]]]:
    """The path of a published file, its columns and its rows; what is left out of a row is "".

    Args:
        file: a CSV file in the folder ``beside``, or else one that comes with the package.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    path = beside / file
    if not path.is_file():
        path = Path(str(files(PACKAGE))) / file
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            columns = list(reader.fieldnames or ())
            rows = [{name: row[name] or "" for name in columns} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        known = [p.name for p in Path(str(files(PACKAGE))).glob("*.csv")]
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read published file {file}: {reason}{suggestion(file, known)}") from error
    return path, columns, rows
