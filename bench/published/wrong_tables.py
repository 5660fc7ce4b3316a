"""What is wrong with a published table of a scenario, as (key path within it, message)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, suggestion
from spbench.bench.published.answer import Mistake
from spbench.bench.published.cell_fields import FIELDS, is_option
from spbench.bench.published.published import published_rows
from spbench.bench.published.quantity_columns import PublishedRow

if TYPE_CHECKING:
    from spbench.bench.published.answers.tables import PublishedTable


def wrong_words(table: PublishedTable, folder: Path) -> Iterator[Mistake]:
    """What is wrong with a table as far as its words and the header of its file show."""
    try:
        _, columns, _ = published_rows(table.published.file, folder)
    except UserError as error:
        yield ["published"], str(error)
        return
    keys = ("match", "where", "names", "settings", "quantities")
    named = [([key, column], column) for key in keys for column in getattr(table, key)]
    named += [(["named_by"], column) for column in table.named_by]
    named += [(["status"], table.status)] if table.status is not None else []
    for path, column in named:
        if column not in columns:
            yield path, f"{table.published.file} has no column {column!r}{suggestion(column, columns)}"
    fields = [(["match", column], field) for column, field in table.match.items()]
    fields += [(["cells", field], field) for field in table.cells]
    fields += [
        (["settings", column, word, field], field)
        for column, words in table.settings.items()
        for word, given in words.items()
        for field in given
    ]
    for path, field in fields:
        if field not in FIELDS and not is_option(field):
            yield path, f"unknown field {field!r}{suggestion(field, FIELDS)}"
    for column, quantity in table.quantities.items():
        for key, message in quantity.mistakes():
            yield ["quantities", column, key], message


def wrong_rows(
    table: PublishedTable, rows: Sequence[PublishedRow], statuses: Sequence[str]
) -> Iterator[Mistake]:
    """What is wrong with the rows of the file.

    Args:
        statuses: the words that the column of statuses may have.
    """
    file = table.published.file
    if not rows:
        yield ["where" if table.where else "published"], f"no row of {file} is left; every table needs one"
    for row in rows:
        if table.status is not None and row.text[table.status] not in statuses:
            found, known = row.text[table.status], ", ".join(statuses[:-1])
            yield ["status"], f"row {row.line} of {file} says {found!r}; it must be {known} or {statuses[-1]}"
        for column, quantity in table.quantities.items():
            try:
                quantity.places(row, column)
            except ValueError:
                found = row.text[column]
                yield ["quantities", column], f"row {row.line} of {file} has no number there but {found!r}"


def wrong_matches(
    table: PublishedTable, rows: Sequence[PublishedRow], declared: Sequence[Cell]
) -> Iterator[Mistake]:
    """Each row must speak of one cell on each cluster and engine, and no two rows of the same unless they are
    repeated measurements of it."""
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
            if cell.key in spoken_of and not table.repeated:
                yield ["match"], f"rows {spoken_of[cell.key]} and {row.line} both speak of {cell.key}"
            spoken_of[cell.key] = row.line
