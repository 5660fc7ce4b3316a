"""A comparison of one published number or status with ours; pandas frames with a line for each comparison;
the CSV files of comparisons; and drawing the figures of a scenario's rows and of a paper's records."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spbench.bench import measure
from spbench.bench.command_line.progress import message
from spbench.bench.command_line.scenario_run import RanScenario
from spbench.bench.errors import UserError, refuse_unknown, shown
from spbench.bench.files import read_text, write_whole
from spbench.bench.units import six_digits
from spbench.bench.yaml_files import finite
from spbench.impls import told
from spbench.plots import FIGURES, NothingToDraw

if TYPE_CHECKING:
    from pandas import DataFrame

    from spbench.bench.cell import Cell

#: calibrated: a scalar of the cluster was fitted to the published number; inferred: a setting was chosen by
#: looking at the number; predicted: neither; formula: a closed form; curve: the losses of training runs
Role = Literal["calibrated", "inferred", "predicted", "formula", "curve"]

COMPARISON_FILE = "comparison.csv"
#: the columns that hold numbers
NUMBERS = ("published", "reproduced", "relative_error")
#: columns on what our time rests on; see :class:`Measurement`
OF_TIMES = ("rates", "bound")
#: the column with the share of our time that has no rate of its own; "" for no such share
UNKNOWN = "unknown"
#: the column with the share of the card that our fullest rank reserves
FILLED = "filled"
#: columns of PAPER.csv; the last ones say where a number comes from, and what our time and memory rest on
RECORDS = (
    *("table", "cell", "strategy", "quantity", *NUMBERS),
    *("status_published", "status_reproduced", "role", "scenario", "variant", "note", "source", *OF_TIMES),
    *(UNKNOWN, FILLED),
)
#: columns of PAPER.csv that comparison.csv lacks
_OF_RECORDS_ALONE = ("scenario", *OF_TIMES, UNKNOWN, FILLED)
#: the answer of a number that is no row of a table, by its role; others answer to "claims"
_ANSWERS = {"formula": "formulas", "curve": "curves"}


@dataclass(frozen=True)
class Comparison:
    """The comparison of one published number, or status, with ours, in one variant.

    Attributes:
        published: the published number; None if a table has only a status.
        reproduced: our number; None if there is none, and the note says why.
        relative_error: reproduced / published - 1.
        numerator, denominator: the keys of the cells that our number comes from.
        table: the published table, followed by ": " and the machine, rank or step if a cell has several
            numbers; "" for a claim.
        cell: the cell's key; for a ratio both keys, with " / " between them.
        quantity: the compared quantity: a column of the published table, ratio, max_batch, ...
        status_published, status_reproduced: ok, oom or unstated, and our status; "" for none.
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
        """The comparison of one cell, or of numerator and denominator; None among ``cells``: no such cell."""
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
    """A number as text for people, or a status if there is no number; both if a failed run has a number.

    Args:
        shown: makes the number's text; None: six digits.
    """
    if number is None:
        return status or None
    text = (shown or six_digits)(number)
    return text if status in ("", "ok") else f"{status} ({text})"


def is_rate(quantity: str) -> bool:
    """Whether a quantity grows as the time shrinks: a number per second, or an MFU."""
    return quantity.endswith(("per_s", "mfu_percent"))


def is_time(quantity: str) -> bool:
    """Whether a quantity is a time, or a rate; see :func:`is_rate`."""
    return is_rate(quantity) or quantity.endswith(("_s", "_ms"))


def frame_of(entries: Iterable[Comparison | Mapping[str, Any]]) -> DataFrame:
    """A frame with a line for each comparison, or line of :func:`read_records`, and the columns of
    :class:`Comparison`; a missing number is NaN, a missing text "". Further columns follow from these:

    - of_table: whether the number is in a row of a published table; claims and formulas have no status
    - table_name, label: the published table; and the measurement, rank and step if a cell has several
      numbers, "" for most tables
    - answer: the published table and quantity, or "claims", "formulas" or "curves"
    - file, run: the published file, and FILE:ROW of the run, whatever the column and the rank
    - has_both: whether there is a published number and one of ours, neither 0
    - is_rate, is_time: the results of :func:`is_rate` and :func:`is_time` for the quantity
    """
    from pandas import DataFrame

    types = {field.name: float if field.name in NUMBERS else str for field in fields(Comparison)}
    blank = {name: None if of is float else "" for name, of in types.items()}
    lines = [{**blank, **(vars(each) if isinstance(each, Comparison) else each)} for each in entries]
    frame = DataFrame(lines, columns=[*types]).astype(types)
    of_table = frame["status_published"] != ""
    tables = frame["table"].str.extract("^(.*?)(?:: (.*))?$").fillna("")
    sources = frame["source"].str.split(":")
    answers = (tables[0] + ": " + frame["quantity"]).where(of_table, frame["role"].map(_ANSWERS))
    return frame.assign(
        of_table=of_table,
        table_name=tables[0],
        label=tables[1],
        answer=answers.fillna("claims"),
        file=sources.str[0],
        run=sources.str[:2].str.join(":"),
        has_both=(frame[["published", "reproduced"]].fillna(0) != 0).all(axis=1),
        is_rate=frame["quantity"].map(is_rate).astype(bool),
        is_time=frame["quantity"].map(is_time).astype(bool),
    )


def joined(frames: Iterable[DataFrame]) -> DataFrame:
    """The lines of several frames of :func:`frame_of` in one frame, with new row numbers; perhaps empty."""
    from pandas import concat

    return concat([frame_of([]), *frames], ignore_index=True)


def groups(frame: DataFrame, *columns: str) -> Iterator[tuple[Any, DataFrame]]:
    """(value, lines with that value) for each value of a column, or of several columns, in the order in which
    values first appear."""
    yield from frame.groupby([*columns] if len(columns) > 1 else columns[0], sort=False)


def with_none(frame: DataFrame) -> DataFrame:
    """The frame with None in place of missing numbers, for texts and JSON."""
    return frame.astype(object).where(frame.notna(), None)


def lines_of(frame: DataFrame) -> Iterator[Any]:
    """The lines of a frame as named tuples, with None in place of missing numbers."""
    yield from with_none(frame).itertuples()


def as_lines(frame: DataFrame, columns: Sequence[str] = RECORDS) -> list[dict[str, Any]]:
    """The lines of a frame as mappings of these columns, with None in place of missing numbers."""
    return [dict(zip(columns, line, strict=True)) for line in with_none(frame[[*columns]]).to_numpy()]


def as_frame(comparisons: Iterable[Comparison]) -> DataFrame:
    """The columns of comparison.csv; missing numbers are NaN."""
    return frame_of(comparisons)[
        [field.name for field in fields(Comparison) if field.name not in _OF_RECORDS_ALONE]
    ]


def parts_of_a_whole(records: DataFrame, column: str) -> list[float]:
    """The shares in the column :data:`UNKNOWN` or :data:`FILLED`, at least 0; NaN for an empty text.
    UserError for a text that is no number."""
    parts = []
    for source, text in zip(records["source"], records[column], strict=True):
        try:
            parts.append(max(0.0, finite(text)) if text else math.nan)
        except ValueError as error:
            raise UserError(f"{source}: {column}: {shown(text)} is no part of a whole") from error
    return parts


def write(comparisons: Iterable[Comparison], folder: Path) -> Path:
    """Write comparison.csv and return its path; errors as in :func:`write_csv`."""
    return write_csv(as_frame(comparisons), folder / COMPARISON_FILE)


def write_csv(table: DataFrame, path: Path) -> Path:
    """Write a table as a CSV file, without its index, whole or not at all; returns the path. UserError if the
    file cannot be written; an earlier file is unchanged."""
    return write_whole(path, table.to_csv(index=False, lineterminator="\n"))


def read_comparisons(path: Path, needed: Sequence[str] = ()) -> DataFrame:
    """The lines of PAPER.csv as a frame of :func:`frame_of`; UserError as in :func:`read_records`."""
    return frame_of(read_records(path, needed))


def read_records(
    path: Path, needed: Sequence[str] = (), *, any_number: bool = False
) -> list[Mapping[str, Any]]:
    """The lines of a file of comparisons, or of `spbench reproduce`; NUMBERS are floats, None if empty.
    UserError if the file cannot be read, lacks a column, or has a text for a number.

    Args:
        needed: columns that the file must have.
        any_number: accept numbers that are not finite.
    """
    columns, rows = read_csv(path)
    for name in needed:
        refuse_unknown(f"cannot read {path}: no column", name, columns)
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
    """The columns and rows of a CSV file with a header; missing cells at the end of a row are "". UserError
    if the file cannot be read, two columns have one name, or a row has more cells than the header."""
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


def draw_figure(
    scenario: measure.Scenario, ran: RanScenario, comparisons: Sequence[Comparison], folder: Path
) -> tuple[list[Path], bool]:
    """Draw the scenario's figure; returns its files, and whether drawing failed."""
    figure = scenario.document.figure
    if figure is None or not ran.known:
        return [], False
    return draw(figure, [measure.with_band(row) for row in ran.known.values()], as_frame(comparisons), folder)


def draw(
    figure: str, rows: Sequence[Mapping[str, Any]], comparison: DataFrame, folder: Path
) -> tuple[list[Path], bool]:
    """Draw a figure; returns its files (none if there is no such figure), and whether drawing failed."""
    if figure not in FIGURES:
        return [], False
    try:
        return [Path(path) for path in FIGURES.load(figure)(rows, comparison, folder)], False
    except NothingToDraw as error:
        message(f"spbench: the figure {figure} was not drawn: {error}; the results are kept")
    except (Exception, SystemExit) as error:
        message(f"spbench: the figure {figure} could not be drawn: {told(error)}; the results are kept")
    return [], True
