"""A row, the result of a cell: its schema, its line of a results file, and the commit that it is from."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PositiveInt, StringConstraints, ValidationError
from typing_extensions import TypedDict

from spbench.bench.errors import UserError
from spbench.bench.git import DIRTY
from spbench.bench.measurement import Count, Measured, Number, Record, Status, Text, described_by
from spbench.bench.yaml_files import dotted

#: the statuses of cells that are done, until their digest changes; the next sweep runs other cells again
FINAL: tuple[Status, ...] = ("ok", "oom", "unsupported", "numerics")

#: the statuses of a missing or wrong result; a command that runs such a cell exits with code 1
FAULTS: tuple[Status, ...] = ("failed", "timeout", "mismatch", "numerics")


class _Search(TypedDict, total=False):
    quantity: Text


class _Cell(TypedDict, total=False):
    model: Text
    strategy: Text
    sizes: dict[Text, Annotated[PositiveInt, Field(strict=True, le=10**9)]]
    mesh: list[Text] | None
    batch: Count | None
    seq_len: Count | None
    cluster: Text
    engine: Text
    precision: Text | None
    variant: Text
    search: _Search | None
    training: dict[str, Any] | None


class _Machine(TypedDict, total=False):
    os: Text | None
    cpu: Text | None
    cores: Count | None
    memory_bytes: Count | None
    gpus: list[Text] | None
    gpu_driver: Text | None


class _Provenance(TypedDict, total=False):
    spbench: Text | None
    tree: Text | None
    commit: Text | None
    project_commit: Text | None
    torch: Text | None
    python: Text | None
    host: Text | None
    cpu: Text | None
    machine: _Machine | None


class Row(Record):
    """The result of a cell; rows of older versions have fewer fields, and rows may have more.

    Attributes:
        cell: the cell's settings as JSON, as :class:`Cell` had them when the cell was run.
        elapsed_s: the seconds that the cell ran.
        time: when the cell ended, in UTC.
        digest: a digest of all inputs of the row (:mod:`measure.sweep.provenance`); None in older rows.
        provenance: code, libraries and machine (:func:`measure.sweep.provenance.provenance`).
        traceback, log: see :class:`Outcome`.
        final: whether another run would have the same outcome.
        rounds: the measured metrics of each process that ran the cell, where several did.
    """

    key: Annotated[str, StringConstraints(strict=True, min_length=1)]
    cell: Annotated[dict[str, Any], described_by(_Cell)]
    status: Status
    reason: Text = ""
    measurement: Measured
    elapsed_s: Number | None = None
    time: Text = ""
    digest: Any = None
    provenance: Annotated[dict[str, Any] | None, described_by(_Provenance | None)] = None
    traceback: Any = ""
    log: Any = ""
    final: Any = True
    rounds: list[Measured] = []

    @classmethod
    def _nested(cls) -> tuple[str, ...]:
        return ("measurement", "rounds")


#: the most characters of a wrong value that a message shows
_SHOWN = 40


def problem(error: ValidationError) -> str:
    """A text on the first field that a schema refuses: the field, its value, and the reason."""
    first = error.errors(include_url=False)[0]
    value = first["input"]
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else ""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return ": ".join(filter(None, [dotted(first["loc"]), shown, first["msg"]]))


class WrongRow(ValueError):
    """A line is not a row; the text names the field and what is wrong."""


def parse_row(line: bytes) -> Row:
    """The row in a line of JSON.

    Raises:
        WrongRow: the line is no row, or a number in it is not finite.
    """
    row, not_finite = parse_any_row(line)
    if not_finite:
        raise WrongRow(f"{not_finite[0]}: not a finite number")
    return row


def parse_any_row(line: bytes) -> tuple[Row, list[str]]:
    """The row in a line of JSON, and the names of fields whose numbers are not finite; they are NaN.

    Raises:
        WrongRow: the line is no row.
    """
    constants: list[str] = []

    def constant(text: str) -> float:
        constants.append(text)
        return math.nan

    try:
        content = json.JSONDecoder(parse_constant=constant).decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise WrongRow(str(error)) from error
    try:
        row = Row.read(content)
        if not constants:
            return row, []
    except ValidationError as error:
        wrong = problem(error)
        if not isinstance(content, dict):
            raise WrongRow(wrong) from error
    else:
        wrong = ""
    not_finite = [dotted(path) for path in _not_finite(content)]
    try:  # zeros replace the numbers that are not finite, to see whether anything else is wrong
        Row.read(finite(content, 0))
    except ValidationError as error:
        raise WrongRow(wrong) from error
    return Row(**finite(content, math.nan)), not_finite


def json_line(content: Any, *, sort_keys: bool = False) -> str:
    """A line of a results file: JSON without blanks, with null for infinities and NaN."""
    return json.dumps(finite(content), allow_nan=False, sort_keys=sort_keys, separators=(",", ":")) + "\n"


def _not_finite(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _not_finite(each, (*path, key))


def finite(value: Any, by: float | None = None) -> Any:
    """Plain data with ``by`` in place of infinities and NaN, which JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else by
    if isinstance(value, Mapping):
        return {key: finite(inner, by) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner, by) for inner in value]
    return value


#: the keys of the commit of spbench's own code, and of the commit of the project around the working folder
COMMITS = ("commit", "project_commit")


def commit_of(row: Mapping[str, Any]) -> str:
    """The commit of a row: the project's in which spbench ran, else spbench's own; "" without a
    repository."""
    made_by = row.get("provenance") or {}
    return made_by.get("project_commit") or made_by.get("commit") or ""


def check_same_code(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Refuse rows of changed files, and rows of several commits: readers of the numbers must be able to get
    the code that made them all.

    Args:
        rows: the rows by scenario.

    Raises:
        UserError: names the scenario and the remedy.
    """
    first: dict[str, tuple[str, str]] = {}
    for scenario, of_scenario in rows.items():
        for row in of_scenario:
            for which in COMMITS:
                commit = (row.get("provenance") or {}).get(which) or ""
                if commit.endswith(DIRTY):
                    raise UserError(
                        f"{scenario}: rows come from code that is in no commit ({commit}), so that "
                        "nothing is written; commit it, and run again with --fresh"
                    )
                other, first_commit = first.setdefault(which, (scenario, commit))
                if commit != first_commit:
                    raise UserError(
                        f"{scenario}: rows come from commit {commit or 'unknown'}, rows of {other} from "
                        f"{first_commit or 'unknown'}, so that nothing is written; run again with --fresh"
                    )
