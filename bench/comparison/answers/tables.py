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
from spbench.bench.config.answer import QUANTITIES, Answer, Mistake
from spbench.bench.config.choices import strategy_axes
from spbench.bench.config.compared import Comparison, ScenarioResults, relative_error
from spbench.bench.errors import UserError, suggestion
from spbench.bench.files.published_number import PublishedNumber, Scalar, stands_for
from spbench.impls.axes import MESH_AXES, ranks_along

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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableFile(_Strict):
    """A CSV file beside the scenario, or one that comes with the package."""

    file: str


class QuantityColumn(_Strict):
    """A column of numbers: ``field`` of our measurement, divided by ``unit``, is set beside it."""

    field: str
    unit: PositiveFloat = 1.0


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published file.

    Attributes:
        line: number of the row in its file, the first below the header being 1.
        text: what stands in each column; "" for nothing.
    """

    line: int
    text: Mapping[str, str]

    def value(self, column: str) -> float | None:
        """The number in a column, or None where none was published; ValueError for anything else."""
        text = self.text[column].strip()
        return float(text) if text else None


class PublishedTable(Answer):
    """A published table; the module's text shows one."""

    name = "tables"
    naming_field = "table"

    table: str
    published: TableFile
    match: dict[str, str] = Field(min_length=1)
    quantities: dict[str, QuantityColumn] = Field(min_length=1)
    status: str | None = None
    cells: dict[str, Scalar] = {}
    where: dict[str, list[Scalar]] = {}
    names: dict[str, dict[str, Scalar]] = {}
    note: str = ""

    def matches(self, row: PublishedRow, cell: Cell) -> bool:
        """Whether the cell is the one that the row speaks of."""
        if any(field_value(cell, field) != value for field, value in self.cells.items()):
            return False
        return all(
            self._same(column, row.text[column], field_value(cell, field))
            for column, field in self.match.items()
        )

    def _same(self, column: str, text: str, value: Any) -> bool:
        """Whether a published word of a column stands for a value of ours."""
        names = self.names.get(column, {})
        return names[text] == value if text in names else stands_for(text, value)

    def rows(self, folder: Path) -> list[PublishedRow]:
        """The rows that the scenario asks for, or UserError."""
        _, _, rows = published_rows(self.published.file, folder)
        numbered = [PublishedRow(line, row) for line, row in enumerate(rows, start=1)]
        return [
            row
            for row in numbered
            if all(any(stands_for(row.text[c], v) for v in values) for c, values in self.where.items())
        ]

    def number(self, row: PublishedRow, quantity: str) -> PublishedNumber:
        """One number of a row."""
        source = f"{self.published.file}:{row.line}:{quantity}"
        return PublishedNumber(source, quantity, row.value(quantity), row.text)

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        return [self.number(row, quantity) for quantity in self.quantities for row in self.rows(folder)]

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        fixed = self.cells.items()
        return [c for c in declared if all(field_value(c, field) == value for field, value in fixed)]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        yield from _wrong_words(self, folder)
        rows = self.rows(folder)
        yield from _wrong_rows(self, rows)
        yield from _wrong_matches(self, rows, declared)

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        for quantity in self.quantities:
            for row in self.rows(results.folder):
                if row.value(quantity) is None and self._status(row) == "ok":
                    continue
                for cell in results.cells:
                    if self.matches(row, cell):
                        yield self._entry(row, quantity, cell, results)

    def _status(self, row: PublishedRow) -> str:
        return row.text[self.status] if self.status is not None else "ok"

    def _entry(self, row: PublishedRow, quantity: str, cell: Cell, results: ScenarioResults) -> Comparison:
        """One number of the table, or the status of a run that has none."""
        published, status = self.number(row, quantity), self._status(row)
        found = results.rows.get(cell.key)
        field, unit = self.quantities[quantity].field, self.quantities[quantity].unit
        ours, notes = None, [*filter(None, (self._settings(row), self.note))]
        if found is None:
            notes.append("was not run")
        else:
            value = found["measurement"].get(field)
            ours = None if value is None else value / unit
            reason = f": {found['reason']}" if found["reason"] else ""
            if status == UNSTATED:
                notes += [f"{found['status']}{reason}"] * (found["status"] != "ok")
            elif found["status"] != status:
                notes.append(f"published {status}, ours {found['status']}{reason}")
            elif ours is None and published.value is not None:
                notes.append(f"has no {field}")
        return Comparison(
            claim=self.label(row, quantity),
            published=published.value,
            reproduced=ours,
            relative_error=relative_error(published.value, ours),
            role=results.role(self.table, published, field, [cell]),
            note="; ".join(notes),
            variant=cell.variant,
            numerator=cell.key,
            denominator="",
            table=self.table,
            cell=cell.key,
            strategy=cell.strategy,
            quantity=quantity,
            status_published=status,
            status_reproduced="" if found is None else found["status"],
            source=published.source,
        )

    def label(self, row: PublishedRow, quantity: str) -> str:
        """A name for one number of the table that nothing else in the scenario has."""
        where = ", ".join(f"{column} {row.text[column]}" for column in self.match)
        return f"{self.table}: {quantity}, {where}"

    def _settings(self, row: PublishedRow) -> str:
        """The options that a row names; the name of its cell has a hash in their place."""
        optional = [c for c, field in self.match.items() if field.partition(".")[0] in SECTIONS]
        return ", ".join(f"{column} {row.text[column]}" for column in optional if row.text[column])


def field_value(cell: Cell, field: str) -> Any:
    """A field of a cell as FIELDS and SECTIONS name it; None for an option that the cell does not set."""
    if field == "parallel":
        return ranks_along(strategy_axes(cell.strategy), cell.sizes.by_axis)
    if field == "world":
        return cell.sizes.world
    if field in MESH_AXES:
        return cell.sizes.by_axis[field]
    section, _, option = field.partition(".")
    found = getattr(cell, section)
    if not option:
        return found
    return found.get(option) if isinstance(found, Mapping) else getattr(found, option, None)


# -- what is wrong with a table --------------------------------------------------------------------------


def _wrong_words(table: PublishedTable, folder: Path) -> Iterator[Mistake]:
    """What is wrong with a table as far as its words and the header of its file show."""
    try:
        _, columns, _ = published_rows(table.published.file, folder)
    except UserError as error:
        yield ["published"], str(error)
        return
    keys = ("match", "where", "names", "quantities")
    named = [([key, column], column) for key in keys for column in getattr(table, key)]
    named += [(["status"], table.status)] if table.status is not None else []
    for path, column in named:
        if column not in columns:
            yield path, f"{table.published.file} has no column {column!r}{suggestion(column, columns)}"
    fields = [(["match", column], field) for column, field in table.match.items()]
    fields += [(["cells", field], field) for field in table.cells]
    for path, field in fields:
        section, _, option = field.partition(".")
        if field not in FIELDS and not (option and section in SECTIONS):
            yield path, f"unknown field {field!r}{suggestion(field, FIELDS)}"
    for column, quantity in table.quantities.items():
        if quantity.field not in QUANTITIES:
            hint = suggestion(quantity.field, QUANTITIES)
            yield ["quantities", column, "field"], f"unknown quantity {quantity.field!r}{hint}"


def _wrong_rows(table: PublishedTable, rows: Sequence[PublishedRow]) -> Iterator[Mistake]:
    """What is wrong with the rows of the file."""
    file = table.published.file
    if not rows:
        yield ["where" if table.where else "published"], f"no row of {file} is left; every table needs one"
    for row in rows:
        if table.status is not None and row.text[table.status] not in STATUSES:
            found, known = row.text[table.status], ", ".join(STATUSES[:-1])
            yield ["status"], f"row {row.line} of {file} says {found!r}; it must be {known} or {STATUSES[-1]}"
        for column in table.quantities:
            try:
                row.value(column)
            except ValueError:
                found = row.text[column]
                yield ["quantities", column], f"row {row.line} of {file} has no number there but {found!r}"


def _wrong_matches(
    table: PublishedTable, rows: Sequence[PublishedRow], declared: Sequence[Cell]
) -> Iterator[Mistake]:
    """Each row must speak of one cell on each cluster and engine, and no two rows of the same."""
    spoken_of: dict[str, int] = {}
    for row in rows:
        matched = [cell for cell in declared if table.matches(row, cell)]
        what = ", ".join(f"{column} {row.text[column]}" for column in table.match)
        where = f"row {row.line} of {table.published.file} ({what})"
        if not matched:
            yield ["match"], f"no group declares the cell of {where}"
        if len({(cell.cluster, cell.engine) for cell in matched}) < len(matched):
            keys = f"{matched[0].key} and {matched[1].key}"
            mend = "match another column, or tell them apart in cells"
            yield ["match"], f"{where} is {len(matched)} cells, such as {keys}; {mend}"
        for cell in matched:
            if cell.key in spoken_of:
                yield ["match"], f"rows {spoken_of[cell.key]} and {row.line} both speak of {cell.key}"
            spoken_of[cell.key] = row.line
