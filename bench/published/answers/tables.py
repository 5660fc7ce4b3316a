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

A row may be one of several measurements of a cell, and its numbers those of a rank and a step::

        repeated: true                              # several rows may speak of one cell
        named_by: [case, machine]                   # columns whose words name a row in the results
        settings:                                   # column: word: fields and their values
          case: {tp4_pp1: {model: bert-large, tp: 4, pp: 1}}
        quantities:
          peak_first: {field: peak_memory_bytes, unit: 1073741824, published_unit: 1,
                       rank: last, step: first, as: peak_memory_gib}
          peak_by_rank: {field: peak_memory_bytes, unit: 1048576, rank: each}     # {"0": 11.5, "1": 10.25}

Fields are those of :mod:`bench.published.cell_fields`; an option is written with its section, as
``model_options.layers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from spbench.bench.cell import Cell
from spbench.bench.published.answer import Answer, Mistake
from spbench.bench.published.cell_fields import field_value, is_option
from spbench.bench.published.compared import Comparison, ScenarioResults, relative_error
from spbench.bench.published.published import published_rows
from spbench.bench.published.quantity_columns import WHOLE_RUN, Place, PublishedRow, QuantityColumn
from spbench.bench.published.wrong_tables import wrong_matches, wrong_rows, wrong_words
from spbench.bench.published_number import PublishedNumber, Scalar, stands_for
from spbench.bench.sweep.results import Row

#: the word for a run that a paper shows, as a bar or in words, without a number that could be copied
UNSTATED = "unstated"
#: what a published row may say became of its run
STATUSES = ("ok", "oom", UNSTATED)


class TableFile(BaseModel):
    """A CSV file beside the scenario, or one that comes with the package."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str


class PublishedTable(Answer):
    """A published table; the module's text shows one."""

    name = "tables"
    naming_field = "table"

    table: str = Field(pattern="^[^:]*$")
    published: TableFile
    match: dict[str, str] = Field(min_length=1)
    quantities: dict[str, QuantityColumn] = Field(min_length=1)
    status: str | None = None
    cells: dict[str, Scalar] = {}
    where: dict[str, list[Scalar]] = {}
    names: dict[str, dict[str, Scalar]] = {}
    settings: dict[str, dict[str, dict[str, Scalar]]] = {}
    named_by: list[str] = []
    repeated: bool = False
    note: str = ""

    @property
    def by_name(self) -> dict[str, QuantityColumn]:
        """The first column of each quantity, by the name that it has in comparisons."""
        found: dict[str, QuantityColumn] = {}
        for column, quantity in self.quantities.items():
            found.setdefault(quantity.named or column, quantity)
        return found

    def matches(self, row: PublishedRow, cell: Cell) -> bool:
        """Whether the cell is the one that the row speaks of."""
        wanted = [self.cells, *(words.get(row.text[column], {}) for column, words in self.settings.items())]
        if any(field_value(cell, field) != value for fields in wanted for field, value in fields.items()):
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

    def number(self, row: PublishedRow, column: str, place: Place) -> PublishedNumber:
        """One number of a row."""
        source = f"{self.published.file}:{row.line}:{column}"
        if self.quantities[column].rank == "each":
            source += f":{place.rank}"
        return PublishedNumber(source, column, place.value, row.text)

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        rows = self.rows(folder)
        return [
            self.number(row, column, place)
            for column, quantity in self.quantities.items()
            for row in rows
            for place in quantity.places(row, column)
        ]

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        fixed = self.cells.items()
        return [c for c in declared if all(field_value(c, field) == value for field, value in fixed)]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        yield from wrong_words(self, folder)
        rows = self.rows(folder)
        yield from wrong_rows(self, rows, STATUSES)
        yield from wrong_matches(self, rows, declared)

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        for column, quantity in self.quantities.items():
            for row in self.rows(results.folder):
                cells = [cell for cell in results.cells if self.matches(row, cell)]
                for place in quantity.places(row, column):
                    if place.value is not None or self._status(row) != "ok":
                        for cell in cells:
                            yield self._entry(row, column, place, cell, results)

    def _status(self, row: PublishedRow) -> str:
        return row.text[self.status] if self.status is not None else "ok"

    def _entry(
        self, row: PublishedRow, column: str, place: Place, cell: Cell, results: ScenarioResults
    ) -> Comparison:
        """One number of the table, or the status of a run that has none."""
        published, quantity = self.number(row, column, place), self.quantities[column]
        found = results.rows.get(cell.key)
        ours = None if found is None else quantity.ours(found["measurement"], cell, place)
        notes = [
            self._settings(row),
            self.note,
            quantity.note,
            *self._notes(row, quantity, place, ours, found),
        ]
        name = quantity.named or column
        return Comparison(
            claim=self.label(row, column, place),
            published=published.value,
            reproduced=ours,
            relative_error=relative_error(published.value, ours),
            role=results.role(self.table, published, quantity.field, [cell]),
            note="; ".join(filter(None, notes)),
            variant=cell.variant,
            numerator=cell.key,
            denominator="",
            table=self._labelled(row, quantity, place),
            cell=cell.key,
            strategy=cell.strategy,
            quantity=name,
            status_published=self._status(row),
            status_reproduced="" if found is None else found["status"],
            source=published.source,
        )

    def _notes(
        self, row: PublishedRow, quantity: QuantityColumn, place: Place, ours: float | None, found: Row | None
    ) -> list[str]:
        """Why a number has none of ours beside it, or how the run ended otherwise than published."""
        status = self._status(row)
        if found is None:
            return ["was not run"]
        reason = f": {found['reason']}" if found["reason"] else ""
        if status == UNSTATED:
            return [f"{found['status']}{reason}"] * (found["status"] != "ok")
        if found["status"] != status:
            return [f"published {status}, ours {found['status']}{reason}"]
        return [f"has no {quantity.field}"] * (ours is None and place.value is not None)

    def label(self, row: PublishedRow, column: str, place: Place = WHOLE_RUN) -> str:
        """A name for one number of the table that nothing else in the scenario has."""
        columns = dict.fromkeys((*self.named_by, *self.match))
        where = [f"{name} {row.text[name]}" for name in columns]
        return f"{self.table}: {column}, {', '.join([*where, *self.quantities[column].words(place)])}"

    def _labelled(self, row: PublishedRow, quantity: QuantityColumn, place: Place) -> str:
        """The table's name, with the words of the row and the rank and step of the number, if any."""
        words = [_word(column, row.text[column]) for column in self.named_by] + quantity.words(place)
        return f"{self.table}: {', '.join(words)}" if words else self.table

    def _settings(self, row: PublishedRow) -> str:
        """The options that a row names; the name of its cell has a hash in their place."""
        optional = [column for column, field in self.match.items() if is_option(field)]
        return ", ".join(f"{column} {row.text[column]}" for column in optional if row.text[column])


def _word(column: str, text: str) -> str:
    """What stands in a column, after the column's name if it is a number."""
    return f"{column} {text}" if text.replace(".", "", 1).isdecimal() else text
