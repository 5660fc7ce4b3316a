"""Results as they are read to be held against others: our own rows, or what pytest-benchmark has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.published.comparison import COMPARISON_FILE, NUMBERS, read_records
from spbench.bench.regressions.pytest_benchmark_files import benchmark_files, read_benchmarks
from spbench.bench.sweep.results import RESULTS_FILE, Row, read_rows

Claims = dict[tuple[str, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Results:
    """What is compared.

    Attributes:
        cells: rows by key.
        claims: the rows of comparison.csv by claim, variant, numerator and denominator; None: there is no
            such file.
        notes: what the files lack, a line each.
    """

    path: Path
    cells: Mapping[str, Row]
    claims: Claims | None = None
    notes: Sequence[str] = ()

    @property
    def commits(self) -> list[str]:
        """The commits of the code that made the rows, in the order in which they first appear; "" stands for
        rows that do not say."""
        return list(dict.fromkeys(_origin(row, "commit") for row in self.cells.values()))

    @property
    def machines(self) -> list[str]:
        """The machines that made the rows, as :func:`machine_of` names them, in the order in which they first
        appear."""
        return list(dict.fromkeys(machine_of(row) for row in self.cells.values()))


def machine_of(row: Row) -> str:
    """The machine that made a row, as far as the row says: host name, processor and GPUs, with commas
    between them."""
    return ", ".join(filter(None, _machine(row)))


def same_machine(a: Row, b: Row) -> bool:
    """Whether two rows are of one machine: the host is the same, and whatever else both say of it."""
    pairs = list(zip(_machine(a), _machine(b), strict=True))
    return all(pairs[0]) and all(one == other for one, other in pairs if one and other)


def _machine(row: Row) -> tuple[str, str, str]:
    """Host name, processor and GPUs; "" for what a row does not say."""
    facts = (row.get("provenance") or {}).get("machine") or {}
    cpu = facts.get("cpu") or _origin(row, "cpu")
    return _origin(row, "host"), str(cpu), ", ".join(facts.get("gpus") or ())


def _origin(row: Row, key: str) -> str:
    return str((row.get("provenance") or {}).get(key) or "")


def suite_of(path: Path) -> str:
    """The name of the results at a path: that of their folder, or of their file without its ending."""
    place = path.resolve()
    if place.is_dir():
        return place.name
    return place.parent.name if place.name == RESULTS_FILE else place.stem


def read_results(path: Path) -> Results:
    """Read a cells.jsonl, or a folder with one and, perhaps, a comparison.csv; or a JSON file of
    pytest-benchmark, or a folder of such files of one commit, each of which is a round.

    Raises:
        UserError: a file is missing, cannot be read or has a line that is not a row, or there is no row.
    """
    cells = path / RESULTS_FILE if path.is_dir() else path
    if files := benchmark_files(path):
        rows, notes = read_benchmarks(files)
    elif not cells.is_file():
        raise UserError(f"cannot read {cells}: no such file; name one, or a folder with {RESULTS_FILE}")
    else:
        rows, problems = read_rows(cells)
        notes = []
        if problems:
            raise UserError(problems[0].replace("skipped", "so that nothing can be compared"))
    if not rows:
        raise UserError(f"{cells} has no rows, so that nothing can be compared")
    claims = path / COMPARISON_FILE
    by_key = {row["key"]: row for row in rows}
    return Results(path, by_key, _read_claims(claims) if claims.is_file() else None, notes)


def _read_claims(path: Path) -> Claims:
    name = ("claim", "variant", "numerator", "denominator")
    rows = read_records(path, (*name, *NUMBERS, "status_published", "status_reproduced"))
    return {tuple(row[column] for column in name): row for row in rows}
