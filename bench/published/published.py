"""Published numbers: data in CSV files, each with its source, read for comparison and nothing else."""

from __future__ import annotations

import csv
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from spbench.bench.errors import UserError, suggestion
from spbench.bench.published_number import PublishedNumber

#: where published files of the package are: those of papers, and those of measurements on real machines
PACKAGES = ("spbench.results.papers", "spbench.results.measured")


class PublishedPlace(BaseModel):
    """Where a published number or formula stands: in the row of a CSV file whose ``key`` is the claim's name.

    The methods take that name and the scenario file's folder; a file in that folder has precedence over one
    that comes with the package.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    key: str = "claim"
    column: str = "published"

    def source(self, claim: str) -> str:
        """FILE:ROW:COLUMN."""
        return f"{self.file}:{claim}:{self.column}"

    def text(self, claim: str, folder: Path) -> str:
        """What stands there.

        Raises:
            UserError: there is no such file, row or column.
        """
        return self._row(claim, folder)[self.column]

    def number(self, claim: str, quantity: str, folder: Path) -> PublishedNumber:
        """The number that stands there, as one of this quantity.

        Raises:
            UserError: there is no such file, row or column, or no number there.
        """
        row = self._row(claim, folder)
        try:
            value = float(row[self.column])
        except ValueError as error:
            found = row[self.column]
            raise UserError(f"{self.file}: {self.column} of {claim!r} is not a number: {found!r}") from error
        return PublishedNumber(self.source(claim), quantity, value, row)

    def _row(self, claim: str, folder: Path) -> dict[str, str]:
        path, columns, rows = published_rows(self.file, folder)
        for name in (self.key, self.column):
            if name not in columns:
                raise UserError(f"{path}: no column {name!r}{suggestion(name, columns)}")
        found = [entry for entry in rows if entry[self.key] == claim]
        if len(found) != 1:
            many = f"{len(found)} rows have" if found else "no row has"
            hint = suggestion(claim, [e[self.key] for e in rows]) if not found else ""
            raise UserError(f"{path}: {many} {self.key} {claim!r}{hint}")
        return found[0]


def published_rows(file: str, beside: Path) -> tuple[Path, list[str], list[dict[str, str]]]:
    """The path of a published file, its columns and its rows; what is left out of a row is "".

    Args:
        file: a CSV file in the folder ``beside``, or else one that comes with the package.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    folders = [beside, *(Path(str(files(package))) for package in PACKAGES)]
    path = next((found for folder in folders if (found := folder / file).is_file()), beside / file)
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            columns = list(reader.fieldnames or ())
            rows = [{name: row[name] or "" for name in columns} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        known = [p.name for folder in folders[1:] for p in folder.glob("*.csv")]
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read published file {file}: {reason}{suggestion(file, known)}") from error
    return path, columns, rows
