"""CSV files: those of published numbers, each with its source, and what reads any of them."""

from __future__ import annotations

import csv
from importlib.resources import files
from io import StringIO
from pathlib import Path

from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import read_text
from spbench.bench.published_number import PublishedNumber, finite
from spbench.bench.yaml_files import StrictModel

#: where published files of the package are: those of papers, of measurements on real machines, and of step
#: times that others published
PACKAGES = ("spbench.results.papers", "spbench.results.measured", "spbench.results.field")


class PublishedPlace(StrictModel):
    """Where a published number or formula stands: in the row of a CSV file whose ``key`` is the claim's name.

    The methods take that name and the scenario file's folder.
    """

    file: str
    key: str = "claim"
    column: str = "published"

    def source(self, claim: str) -> str:
        """FILE:ROW:COLUMN."""
        return f"{self.file}:{claim}:{self.column}"

    def text(self, claim: str, folder: Path) -> str:
        """What stands there; UserError if there is no such file, row or column."""
        return self._row(claim, folder)[self.column]

    def number(self, claim: str, quantity: str, folder: Path) -> PublishedNumber:
        """The number that stands there, as one of this quantity; UserError if there is none."""
        row = self._row(claim, folder)
        text = row[self.column]
        try:
            return PublishedNumber(self.source(claim), quantity, finite(text), row)
        except ValueError as error:
            raise UserError(f"{self.file}: {self.column} of {claim!r} is not a number: {text!r}") from error

    def _row(self, claim: str, folder: Path) -> dict[str, str]:
        path, columns, rows = published_rows(self.file, folder)
        for name in (self.key, self.column):
            if name not in columns:
                raise UserError(f"{path}: no column {name!r}{suggestion(name, columns)}")
        named = [row for row in rows if row[self.key] == claim]
        if len(named) > 1:
            raise UserError(f"{path}: {len(named)} rows have {self.key} {claim!r}")
        if not named:
            hint = suggestion(claim, [row[self.key] for row in rows])
            raise UserError(f"{path}: no row has {self.key} {claim!r}{hint}")
        return named[0]


def published_rows(file: str, beside: Path) -> tuple[Path, list[str], list[dict[str, str]]]:
    """The path of a published file, its columns and its rows. ``file`` is in the folder ``beside``,
    or else one that comes with the package. UserError if there is no such file, or it cannot be read."""
    folders = [Path(str(files(package))) for package in PACKAGES]
    path = next((at for folder in (beside, *folders) if (at := folder / file).is_file()), None)
    if path is None:
        known = [at.name for folder in folders for at in folder.glob("*.csv")]
        raise UserError(
            f"cannot read published file {file}: No such file or directory{suggestion(file, known)}"
        )
    return path, *read_csv(path)


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
