"""A comparison: one published number, or status, beside ours; and the CSV files of comparisons."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.files import read_text, write_whole
from spbench.bench.measure import unknown_share
from spbench.bench.measurement import filled
from spbench.bench.units import six_digits
from spbench.bench.yaml_files import finite

if TYPE_CHECKING:
    from pandas import DataFrame

    from spbench.bench.cell import Cell

#: calibrated: a scalar of the cluster was fitted to this number; inferred: a setting was chosen by looking at
#: it; predicted: neither; formula: a closed form; curve: the losses of training runs
Role = Literal["calibrated", "inferred", "predicted", "formula", "curve"]

COMPARISON_FILE = "comparison.csv"
#: the columns that hold numbers
NUMBERS = ("published", "reproduced", "relative_error")
#: what of ours a time rests on; see :class:`Measurement`
OF_TIMES = ("rates", "bound")
#: the share of a time that has no rate of its own, where there is such a share
UNKNOWN = "unknown"
#: of a run: the part of its card that our fullest rank reserves
FILLED = "filled"
#: columns of PAPER.csv, of which the last seven say where a number comes from, our time and our memory
RECORDS = (
    *("table", "cell", "strategy", "quantity", *NUMBERS),
    *("status_published", "status_reproduced", "role", "scenario", "variant", "note", "source", *OF_TIMES),
    *(UNKNOWN, FILLED),
)


@dataclass(frozen=True)
class Comparison:
    """One number that was published, or a status, beside ours, in one variant.

    Attributes:
        published: None where a published table has a status and no number.
        reproduced: our number, or None where there is none; the note says why.
        relative_error: reproduced / published - 1.
        numerator, denominator: the keys of the cells that it comes from.
        table: the published table, followed by ": " and what tells the number from others of its cell, if
            there are any (a machine, a rank, a step). "" for a claim.
        cell: the cell's key; of a ratio both, with " / " between them.
        quantity: what is compared: a column of the published table, ratio, max_batch, ...
        status_published, status_reproduced: ok, oom or unstated, and ours; "" where there is none.
        source: FILE:ROW:COLUMN of the published number, by which it is counted once; "" where there is none.
        scenario, rates, bound: of a line of PAPER.csv: its scenario, and what our time rests on and what
            bounds the step, as :class:`Measurement` has them; else "".
        unknown: of such a line: :func:`unknown_share` of the step, three digits; else "".
        filled: of such a line of a table: :func:`filled`, six digits; else "".
    """

    claim: str
    published: float | None
    reproduced: float | None
    relative_error: float | None
    role: Role
    note: str
    variant: str
    numerator: str
    denominator: str
    table: str = ""
    cell: str = ""
    strategy: str = ""
    quantity: str = ""
    status_published: str = ""
    status_reproduced: str = ""
    source: str = ""
    scenario: str = ""
    rates: str = ""
    bound: str = ""
    unknown: str = ""
    filled: str = ""

    @property
    def of_table(self) -> bool:
        """Whether it is a row of a published table; claims and formulas carry no published status."""
        return bool(self.status_published)

    @property
    def table_name(self) -> str:
        """The name of the published table."""
        return self.table.partition(": ")[0]

    @property
    def label(self) -> str:
        """What tells it from others of its cell: measurement, rank and step; "" for most tables."""
        return self.table.partition(": ")[2]

    @property
    def is_time(self) -> bool:
        """Whether the quantity is a time, or says one as its inverse."""
        return self.is_rate or self.quantity.endswith(("_s", "_ms"))

    @property
    def is_rate(self) -> bool:
        """Whether the quantity is larger for a shorter time: so many a second, or an MFU."""
        return self.quantity.endswith(("per_s", "mfu_percent"))

    @property
    def published_run(self) -> str:
        """The published run that the number belongs to: FILE:ROW, whatever the column and the rank."""
        return ":".join(self.source.split(":")[:2])

    @property
    def share(self) -> float:
        """The share of our time that has no rate of its own; 0: none is told. UserError if it is none."""
        return min(1.0, self._part(UNKNOWN) or 0.0)

    @property
    def filled_part(self) -> float | None:
        """The part of its card that our fullest rank reserves; None: none is told. UserError if it is
        none."""
        return self._part(FILLED)

    def _part(self, column: str) -> float | None:
        text = getattr(self, column)
        try:
            return max(0.0, finite(text)) if text else None
        except ValueError as error:
            raise UserError(f"{self.source}: {column}: {shown(text)} is no part of a whole") from error

    @property
    def both(self) -> tuple[float, float]:
        """The published number and ours, where there are both."""
        assert self.published is not None
        assert self.reproduced is not None
        return self.published, self.reproduced

    def recorded(self, scenario: str, measurement: Mapping[str, Any]) -> Comparison:
        """As it stands in PAPER.csv. A claim is a table of one number, under its own name.

        Args:
            measurement: that of the compared cell.
        """
        changed: dict[str, Any] = {
            name: None if (number := getattr(self, name)) is None else float(number) for name in NUMBERS
        }
        changed |= {name: measurement.get(name, "") if self.is_time else "" for name in OF_TIMES}
        if self.is_time and (share := unknown_share(measurement)):
            changed[UNKNOWN] = f"{share:.3g}"
        if self.of_table and (part := filled(measurement)):
            changed[FILLED] = f"{part:.6g}"
        return replace(self, table=self.table or self.claim, scenario=scenario, **changed)

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Comparison:
        """The comparison that a line of :func:`read_records` holds."""
        names = (field.name for field in fields(cls))
        return cls(**{name: line.get(name, None if name in NUMBERS else "") for name in names})

    @property
    def record(self) -> dict[str, Any]:
        """The line of PAPER.csv, by :data:`RECORDS`."""
        return {name: getattr(self, name) for name in RECORDS}

    @classmethod
    def of(
        cls,
        claim: str,
        cells: Sequence[Cell | None],
        published: float | None,
        reproduced: float | None,
        *,
        notes: Sequence[str] = (),
        **further: Any,
    ) -> Comparison:
        """The comparison of these cells: one, or numerator and denominator; None: there is no such cell."""
        keys = [cell.key if cell else "" for cell in cells]
        return cls(
            claim=claim,
            published=published,
            reproduced=reproduced,
            relative_error=reproduced / published - 1 if reproduced is not None and published else None,
            note="; ".join(filter(None, notes)),
            numerator=keys[0],
            denominator="".join(keys[1:]),
            cell=" / ".join(filter(None, keys)),
            strategy=cells[0].strategy if cells[0] else "",
            **further,
        )


def number_or_status(
    number: float | None, status: str, shown: Callable[[float], str] | None = None
) -> str | None:
    """A number for people, or why there is none; both, where a run that failed has a number.

    Args:
        shown: the number as text; None: with six digits.
    """
    if number is None:
        return status or None
    text = (shown or six_digits)(number)
    return text if status in ("", "ok") else f"{status} ({text})"


def as_frame(comparisons: Sequence[Comparison]) -> DataFrame:
    """The comparisons as a table; missing numbers are NaN."""
    from pandas import DataFrame

    columns = [
        field.name
        for field in fields(Comparison)
        if field.name not in ("scenario", *OF_TIMES, UNKNOWN, FILLED)
    ]
    frame = DataFrame([asdict(c) for c in comparisons], columns=columns)
    return frame.astype(dict.fromkeys(NUMBERS, float))


def write(comparisons: Sequence[Comparison], folder: Path) -> Path:
    """Write comparison.csv and return its path; errors as of :func:`write_csv`."""
    return write_csv(as_frame(comparisons), folder / COMPARISON_FILE)


def write_csv(table: DataFrame, path: Path) -> Path:
    """Write a table as a CSV file, without its index, whole or not at all; returns the path. UserError if it
    cannot be written; an earlier one is unchanged."""
    return write_whole(path, table.to_csv(index=False, lineterminator="\n"))


def read_comparisons(path: Path, needed: Sequence[str] = ()) -> list[Comparison]:
    """The lines of PAPER.csv; columns that an older file lacks are "" or None. UserError as of
    :func:`read_records`."""
    return [Comparison.of_line(line) for line in read_records(path, needed)]


def read_records(
    path: Path, needed: Sequence[str] = (), *, any_number: bool = False
) -> list[Mapping[str, Any]]:
    """The lines of a file of comparisons, or of `spbench reproduce`; NUMBERS as float, None where none is.
    UserError if it cannot be read, lacks a column, or has a number that is none.

    Args:
        needed: columns that there must be.
        any_number: also those that are not finite.
    """
    columns, rows = read_csv(path)
    for name in needed:
        if name not in columns:
            raise UserError(f"cannot read {path}: no column {name!r}{suggestion(name, columns)}")
    lines: list[Mapping[str, Any]] = []
    for at, row in enumerate(rows, start=1):
        numbers: dict[str, float | None] = {}
        for name in NUMBERS:
            if name in row:
                try:
                    read = float if any_number else finite
                    numbers[name] = read(row[name]) if row[name] else None
                except ValueError as error:
                    raise UserError(f"{path}: row {at}: {name}: {row[name]!r} is no finite number") from error
        lines.append({**row, **numbers})
    return lines


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and rows of a CSV file with a header; what is left out at the end of a row is "". UserError
    if it cannot be read, two columns have one name, or a row has more cells than the header."""
    text = read_text(path)
    try:
        reader = csv.DictReader(StringIO(text, newline=""), strict=True)
        columns = list(reader.fieldnames or ())
        if len(set(columns)) < len(columns):
            raise ValueError("two columns have one name")
        rows = []
        for row in reader:
            if None in row:
                raise ValueError(f"line {reader.line_num} has more cells than the header")
            rows.append({name: row[name] or "" for name in columns})
    except (ValueError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return columns, rows
