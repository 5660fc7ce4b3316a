"""CSV for people, who may open it in a spreadsheet. What spbench reads again is written by
:mod:`tools.papers.comparison`, as it is."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: a cell of text that begins with one of these is a formula to spreadsheets
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?%?", re.IGNORECASE)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A line of column names and one for each row: numbers as they are, nothing for what is None or absent,
    and an apostrophe before text that a spreadsheet would run as a formula."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_harmless(row.get(name)) for name in columns] for row in rows)
    return stream.getvalue()


def _harmless(value: Any) -> Any:
    is_formula = isinstance(value, str) and value.startswith(FORMULA_SIGNS) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value
