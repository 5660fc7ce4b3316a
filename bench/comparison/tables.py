"""Published tables: every row of a CSV file, matched to the cell that it speaks of.

A scenario says which column names which field of a cell, and which column holds which quantity::

    tables:
      - table: rsa-table4
        published: {file: rsa_table4.csv}
        cells: {model: bert-large}                  # field: value, for what the file does not say
        where: {method: [tensor_parallel]}          # column: values; leave out to take every row
        match: {method: strategy, batch_size: batch, parallel_size: parallel}     # column: field
        names: {method: {Megatron: tensor_parallel}}   # the file's words, where ours are others
        status: status                              # the column with one of STATUSES
        quantities:
          memory_mb: {field: peak_memory_bytes, unit: 1048576}    # ours / unit is compared
        calibrated: {memory_mb: [{parallel_size: 1}]}   # rows that a setting was fitted on

Fields are those in FIELDS: ``parallel`` is the ranks along the strategy's own axes, ``world`` all ranks; an
option is written with its section, as ``model_options.layers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from spbench.bench.cell import Cell
from spbench.bench.comparison.published import published_rows
from spbench.bench.config.expand import Problem
from spbench.bench.errors import UserError, suggestion
from spbench.impls.axes import MESH_AXES, ranks_along
from spbench.impls.strategies.registry import strategies

#: what a column may be matched to; and, with a dot and a name, an option of SECTIONS
FIELDS = (
    *("model", "strategy", "batch", "seq_len", "precision", "cluster", "engine", "parallel", "world"),
    *MESH_AXES,
)
SECTIONS = ("model_options", "strategy_options", "training")

#: the word for a run that a paper shows, as a bar or in words, without a number that could be copied
UNSTATED = "unstated"
#: what a published row may say became of its run
STATUSES = ("ok", "oom", UNSTATED)

Value = str | int | float | bool
_Path = Sequence[str | int]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableFile(_Strict):
    """A CSV file beside the scenario, or one that comes with the package."""

    file: str


class Quantity(_Strict):
    """A column of numbers: ``field`` of our measurement, divided by ``unit``, is set beside it."""

    field: str
    unit: PositiveFloat = 1.0


class Table(_Strict):
    """A published table; the module's text shows one."""

    table: str
    published: TableFile
    match: dict[str, str] = Field(min_length=1)
    quantities: dict[str, Quantity] = Field(min_length=1)
    status: str | None = None
    cells: dict[str, Value] = {}
    where: dict[str, list[Value]] = {}
    names: dict[str, dict[str, Value]] = {}
    calibrated: dict[str, list[dict[str, Value]]] = {}
    note: str = ""

    def matches(self, row: PublishedRow, cell: Cell) -> bool:
        """Whether the cell is the one that the row speaks of."""
        if any(field_value(cell, field) != value for field, value in self.cells.items()):
            return False
        return all(
            _same(row.text[column], field_value(cell, field), self.names.get(column, {}))
            for column, field in self.match.items()
        )

    def role(self, row: PublishedRow, quantity: str) -> str:
        """calibrated, where the row is one that a setting was fitted on, else predicted."""
        fitted = any(row.has(selector) for selector in self.calibrated.get(quantity, []))
        return "calibrated" if fitted else "predicted"

    def label(self, row: PublishedRow, quantity: str) -> str:
        """A name for one number of the table that nothing else in the scenario has."""
        where = ", ".join(f"{column} {row.text[column]}" for column in self.match)
        return f"{self.table}: {quantity}, {where}"

    def settings(self, row: PublishedRow) -> str:
        """The options that a row names; the name of its cell has a hash in their place."""
        optional = [c for c, field in self.match.items() if field.partition(".")[0] in SECTIONS]
        return ", ".join(f"{column} {row.text[column]}" for column in optional if row.text[column])


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published file.

    Attributes:
        line: number of the row in its file, the first below the header being 1.
        text: what stands in each column; "" for nothing.
    """

    line: int
    text: Mapping[str, str]

    def has(self, selector: Mapping[str, Value]) -> bool:
        """Whether the row has these values."""
        return all(_same(self.text[column], value, {}) for column, value in selector.items())

    def number(self, column: str) -> float | None:
        """The number in a column, or None where none was published; ValueError for anything else."""
        text = self.text[column].strip()
        return float(text) if text else None


def rows_of(table: Table, beside: Path) -> list[PublishedRow]:
    """The rows of a table that a scenario asks for, or UserError."""
    _, _, rows = published_rows(table.published.file, beside)
    numbered = [PublishedRow(line, row) for line, row in enumerate(rows, start=1)]
    return [
        row
        for row in numbered
        if all(any(row.has({c: value}) for value in values) for c, values in table.where.items())
    ]


def field_value(cell: Cell, field: str) -> Any:
    """A field of a cell as FIELDS and SECTIONS name it; None for an option that the cell does not set."""
    if field == "parallel":
        return ranks_along(strategies()[cell.strategy].axes, cell.sizes.by_axis)
    if field == "world":
        return cell.sizes.world
    if field in MESH_AXES:
        return cell.sizes.by_axis[field]
    section, _, option = field.partition(".")
    found = getattr(cell, section)
    if not option:
        return found
    return found.get(option) if isinstance(found, Mapping) else getattr(found, option, None)


def _same(text: str, value: Any, names: Mapping[str, Value]) -> bool:
    """Whether a published word stands for a value of ours."""
    if text in names:
        return names[text] == value
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text == ("" if value is None else str(value))


# -- what is wrong with a table --------------------------------------------------------------------------


def check_tables(
    tables: Sequence[Table],
    cells: Mapping[str, Sequence[Cell]],
    beside: Path,
    known_quantities: Sequence[str],
) -> None:
    """Refuse tables that cannot be compared.

    Args:
        cells: the scenario's, by variant.
        known_quantities: what a measurement has.

    Raises:
        Problem: what is wrong, at its key path in the scenario file.
    """
    for number, table in enumerate(tables):
        at: list[str | int] = ["tables", number]
        if table.table in [other.table for other in tables[:number]]:
            raise Problem([*at, "table"], f"{table.table!r} is there already; leave one out")
        for path, message in _wrong(table, beside, known_quantities):
            raise Problem([*at, *path], message)
        rows = rows_of(table, beside)
        for path, message in _wrong_rows(table, rows):
            raise Problem([*at, *path], message)
        for declared in cells.values():
            _check_matches(table, rows, declared, at)


def _wrong(table: Table, beside: Path, known_quantities: Sequence[str]) -> Iterator[tuple[_Path, str]]:
    """What can be told from the table and the header of its file."""
    try:
        _, columns, _ = published_rows(table.published.file, beside)
    except UserError as error:
        yield ["published"], str(error)
        return
    for path, column in _columns_named(table):
        if column not in columns:
            yield path, f"{table.published.file} has no column {column!r}{suggestion(column, columns)}"
    fields: list[tuple[_Path, str]] = [(["match", column], field) for column, field in table.match.items()]
    fields += [(["cells", field], field) for field in table.cells]
    for path, field in fields:
        section, _, option = field.partition(".")
        if field not in FIELDS and not (option and section in SECTIONS):
            yield path, f"unknown field {field!r}{suggestion(field, FIELDS)}"
    for column, quantity in table.quantities.items():
        if quantity.field not in known_quantities:
            hint = suggestion(quantity.field, known_quantities)
            yield ["quantities", column, "field"], f"unknown quantity {quantity.field!r}{hint}"
    for column in table.calibrated:
        if column not in table.quantities:
            yield ["calibrated", column], f"is not in quantities{suggestion(column, table.quantities)}"


def _columns_named(table: Table) -> Iterator[tuple[_Path, str]]:
    """Where a table names a column of its file."""
    for key in ("match", "where", "names", "quantities"):
        for column in getattr(table, key):
            yield [key, column], column
    if table.status is not None:
        yield ["status"], table.status
    for quantity, selectors in table.calibrated.items():
        for index, selector in enumerate(selectors):
            for column in selector:
                yield ["calibrated", quantity, index, column], column


def _wrong_rows(table: Table, rows: Sequence[PublishedRow]) -> Iterator[tuple[_Path, str]]:
    """What is wrong with the rows of the file, or with what is said of them."""
    file = table.published.file
    if not rows:
        yield ["where" if table.where else "published"], f"no row of {file} is left; every table needs one"
    for row in rows:
        if table.status is not None and row.text[table.status] not in STATUSES:
            found, known = row.text[table.status], ", ".join(STATUSES[:-1])
            yield ["status"], f"row {row.line} of {file} says {found!r}; it must be {known} or {STATUSES[-1]}"
        for column in table.quantities:
            try:
                row.number(column)
            except ValueError:
                found = row.text[column]
                yield ["quantities", column], f"row {row.line} of {file} has no number there but {found!r}"
    for quantity, selectors in table.calibrated.items():
        for index, selector in enumerate(selectors):
            if not any(row.has(selector) for row in rows):
                yield ["calibrated", quantity, index], f"no row of {file} is {selector}"


def _check_matches(
    table: Table, rows: Sequence[PublishedRow], cells: Sequence[Cell], at: list[str | int]
) -> None:
    """Each row must speak of one cell on each cluster and engine, and no two rows of the same."""
    spoken_of: dict[str, int] = {}
    for row in rows:
        matched = [cell for cell in cells if table.matches(row, cell)]
        what = ", ".join(f"{column} {row.text[column]}" for column in table.match)
        where = f"row {row.line} of {table.published.file} ({what})"
        if not matched:
            raise Problem([*at, "match"], f"no group declares the cell of {where}")
        if len({(cell.cluster, cell.engine) for cell in matched}) < len(matched):
            keys = f"{matched[0].key} and {matched[1].key}"
            mend = "match another column, or tell them apart in cells"
            raise Problem([*at, "match"], f"{where} is {len(matched)} cells, such as {keys}; {mend}")
        for cell in matched:
            if cell.key in spoken_of:
                other = spoken_of[cell.key]
                raise Problem([*at, "match"], f"rows {other} and {row.line} both speak of {cell.key}")
            spoken_of[cell.key] = row.line
