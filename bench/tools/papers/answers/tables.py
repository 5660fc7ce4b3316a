"""Published tables: every row of a CSV file, matched to the cell that the row is about.

A scenario says which column names which field of a cell, and which column holds which quantity::

    tables:
      - table: rsa-table4
        published: {file: rsa_table4.csv}
        cells: {model: bert-large}                  # field: value, for what the file does not say; null: none
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

Fields are those of :mod:`tools.papers.selector`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.row import Row
from spbench.bench.tools.papers.answer import Answer, ScenarioResults
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.selector import (
    FIELDS,
    Mistake,
    PublishedRow,
    QuantityColumn,
    RankName,
    field_value,
    has_fields,
    is_one,
    is_option,
    unknown,
)
from spbench.bench.tools.papers.sources import published_file
from spbench.bench.yaml_files import PublishedNumber, Scalar, StrictModel, stands_for

#: the word for a run that a paper shows, as a bar or in words, without a number that could be copied
UNSTATED = "unstated"
#: the outcomes of a run that a published row may state
STATUSES = ("ok", "oom", UNSTATED)


class TableFile(StrictModel):
    """A CSV file in the scenario's folder, or one that comes with the package."""

    file: str


class PublishedTable(Answer):
    """A published table, an entry of ``tables`` in a scenario's file; the module shows an example."""

    name = "tables"
    naming_field = "table"

    table: str = Field(pattern="^[^:]*$")
    published: TableFile
    match: dict[str, str] = Field(min_length=1)
    quantities: dict[str, QuantityColumn] = Field(min_length=1)
    status: str | None = None
    cells: dict[str, Scalar | None] = {}
    where: dict[str, list[Scalar]] = {}
    names: dict[str, dict[str, Scalar]] = {}
    settings: dict[str, dict[str, dict[str, Scalar]]] = {}
    named_by: list[str] = []
    repeated: bool = False
    note: str = ""

    @property
    def by_name(self) -> dict[str, QuantityColumn]:
        """The first column of each quantity, by the quantity's name in comparisons."""
        columns: dict[str, QuantityColumn] = {}
        for column, quantity in self.quantities.items():
            columns.setdefault(quantity.named or column, quantity)
        return columns

    def matched(
        self, rows: Sequence[PublishedRow], cells: Sequence[Cell]
    ) -> list[tuple[PublishedRow, list[Cell]]]:
        """Each published row with the cells that the row is about."""
        # the values of each cell are looked up once, not for each row
        values = [
            (cell, [field_value(cell, field) for field in self.match.values()])
            for cell in self.selected(cells)
        ]
        return [(row, [cell for cell, its in values if self._speaks_of(row, cell, its)]) for row in rows]

    def _speaks_of(self, row: PublishedRow, cell: Cell, values: Sequence[Any]) -> bool:
        """Whether a row is about a cell, whose values of the matched fields these are."""
        return all(
            self._same(column, row.text[column], value)
            for column, value in zip(self.match, values, strict=True)
        ) and all(
            has_fields(cell, words.get(row.text[column], {})) for column, words in self.settings.items()
        )

    def _same(self, column: str, text: str, value: Any) -> bool:
        """Whether the text of a column in a published row means our value."""
        names = self.names.get(column, {})
        return names[text] == value if text in names else stands_for(text, value)

    def rows(self, folder: Path) -> list[PublishedRow]:
        """The rows of the published file that ``where`` selects; UserError if the file cannot be read."""
        rows = published_file(self.published.file, folder).rows
        return [
            PublishedRow(line, row)
            for line, row in enumerate(rows, start=1)
            if all(any(stands_for(row[c], v) for v in values) for c, values in self.where.items())
        ]

    def _of_row(self, row: PublishedRow, column: str) -> dict[RankName, PublishedNumber]:
        """The published numbers of a row in a column, by rank."""
        quantity = self.quantities[column]
        source = f"{self.published.file}:{row.line}:{column}"
        return {
            rank: PublishedNumber(source + f":{rank}" * (quantity.rank == "each"), column, value, row.text)
            for rank, value in quantity.numbers(row, column).items()
        }

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        rows = self.rows(folder)
        return [
            number
            for column in self.quantities
            for row in rows
            for number in self._of_row(row, column).values()
        ]

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in declared if has_fields(cell, self.cells)]

    # -- what is wrong with a table ----------------------------------------------------------------------

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        try:
            columns = published_file(self.published.file, folder).columns
        except UserError as error:
            yield ["published"], str(error)
            return
        yield from self._wrong_words(columns)
        rows = self.rows(folder)
        yield from self._wrong_rows(rows)
        yield from self._wrong_matches(rows, declared)

    def _wrong_words(self, columns: Sequence[str]) -> Iterator[Mistake]:
        """A mistake for each column that the file lacks, and for each unknown field."""
        keys = ("match", "where", "names", "settings", "quantities")
        named = [([key, column], column) for key in keys for column in getattr(self, key)]
        named += [(["named_by"], column) for column in self.named_by]
        named += [(["status"], self.status)] if self.status is not None else []
        for path, column in named:
            yield from unknown(path, f"{self.published.file} has no column", column, columns)
        fields = [(["match", column], field) for column, field in self.match.items()]
        fields += [(["cells", field], field) for field in self.cells]
        for column, words in self.settings.items():
            fields += [(["settings", column, word, f], f) for word, given in words.items() for f in given]
        for path, field in fields:
            if not is_option(field):
                yield from unknown(path, "unknown field", field, FIELDS)
        for column, quantity in self.quantities.items():
            for below, message in quantity.mistakes():
                yield ["quantities", column, *below], message

    def _wrong_rows(self, rows: Sequence[PublishedRow]) -> Iterator[Mistake]:
        file = self.published.file
        if not rows:
            yield ["where" if self.where else "published"], f"no row of {file} is left; every table needs one"
        for row in rows:
            if (status := self._status(row)) not in STATUSES:
                known = f"{', '.join(STATUSES[:-1])} or {STATUSES[-1]}"
                yield ["status"], f"row {row.line} of {file} says {status!r}; it must be {known}"
            for column, quantity in self.quantities.items():
                try:
                    quantity.numbers(row, column)
                except ValueError:
                    text = row.text[column]
                    yield ["quantities", column], f"row {row.line} of {file} has no number there but {text!r}"

    def _wrong_matches(self, rows: Sequence[PublishedRow], declared: Sequence[Cell]) -> Iterator[Mistake]:
        """Mistakes of rows: a row must match one cell on each cluster and engine, and no two rows may match
        one cell, unless the table is ``repeated``."""
        spoken_of: dict[str, int] = {}
        for row, matched in self.matched(rows, declared):
            what = ", ".join(f"{column} {row.text[column]}" for column in self.match)
            where = f"row {row.line} of {self.published.file} ({what})"
            if not matched:
                yield ["match"], f"no group declares the cell of {where}"
            if not is_one(matched):
                keys = f"{matched[0].key} and {matched[1].key}"
                mend = "match another column, or tell them apart in cells"
                yield ["match"], f"{where} is {len(matched)} cells, such as {keys}; {mend}"
            for cell in matched:
                if cell.key in spoken_of and not self.repeated:
                    yield ["match"], f"rows {spoken_of[cell.key]} and {row.line} both speak of {cell.key}"
                spoken_of[cell.key] = row.line

    # -- comparison --------------------------------------------------------------------------------------

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        matched = self.matched(self.rows(results.folder), results.cells)
        for column in self.quantities:
            for row, cells in matched:
                for rank, number in self._of_row(row, column).items():
                    if number.value is not None or self._status(row) != "ok":
                        for cell in cells:
                            yield self._entry(row, number, rank, cell, results)

    def _status(self, row: PublishedRow) -> str:
        return row.text[self.status] if self.status is not None else "ok"

    def _entry(
        self, row: PublishedRow, number: PublishedNumber, rank: RankName, cell: Cell, results: ScenarioResults
    ) -> Comparison:
        """The comparison of one number of the table, or of the status of a run that has no number."""
        column, quantity = number.quantity, self.quantities[number.quantity]
        result = results.rows.get(cell.key)
        ours = None if result is None else quantity.ours(result["measurement"], cell, rank)
        lacks = f"has no {quantity.field}" if ours is None and number.value is not None else ""
        named = ((name, row.text[name]) for name in self.named_by)  # a number has its column's name
        words = [f"{name} {text}" if text.replace(".", "", 1).isdecimal() else text for name, text in named]
        return Comparison.of(
            self.label(row, column, rank),
            [cell],
            number.value,
            ours,
            role=results.role(self.table, number, quantity.field, [cell]),
            notes=[self._options(row), self.note, quantity.note, self._outcome(row, result, lacks)],
            variant=cell.variant,
            table=": ".join(filter(None, [self.table, ", ".join([*words, *quantity.words(rank)])])),
            quantity=quantity.named or column,
            status_published=self._status(row),
            status_reproduced="" if result is None else result["status"],
            source=number.source,
        )

    def _outcome(self, row: PublishedRow, result: Row | None, lacks: str) -> str:
        """How our run ended, if unlike the published run; else ``lacks``, why our run has no number."""
        if result is None:
            return "was not run"
        status = self._status(row)
        ended = result["status"] + (f": {result['reason']}" if result["reason"] else "")
        if status == UNSTATED:
            return ended if result["status"] != "ok" else ""
        return f"published {status}, ours {ended}" if result["status"] != status else lacks

    def label(self, row: PublishedRow, column: str, rank: RankName = None) -> str:
        """A name for one number of the table, unique in the scenario."""
        columns = dict.fromkeys((*self.named_by, *self.match))
        where = [f"{name} {row.text[name]}" for name in columns]
        return f"{self.table}: {column}, {', '.join([*where, *self.quantities[column].words(rank)])}"

    def _options(self, row: PublishedRow) -> str:
        """In words, the options that a row gives, because the cell's key has only a hash of its options."""
        optional = [column for column, field in self.match.items() if is_option(field)]
        return ", ".join(f"{column} {row.text[column]}" for column in optional if row.text[column])
