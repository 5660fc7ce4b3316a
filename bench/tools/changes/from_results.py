"""Records from results: what a run has left, with the commit that made it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.files import write_whole
from spbench.bench.git import asked, own_checkout
from spbench.bench.measure.sweep.provenance import COMMITS, check_same_code, commit_of
from spbench.bench.measure.sweep.results import Row
from spbench.bench.tools.changes.metrics import has_exact_engine, readings
from spbench.bench.tools.changes.result_files import read_results, suite_of
from spbench.bench.tools.changes.run_record import CellRecord, Commit, RunRecord, as_lines, utc

#: keys of a row's provenance that are no versions
_NO_VERSIONS = (*COMMITS, "tree", "host", "cpu", "machine")


@dataclass(frozen=True)
class Naming:
    """What a user says of a run that its results do not, or not as wanted; None: as the results have it.

    Attributes:
        suite: the name of the series' suite; else that of the results' folder.
        machine: in the place of the host, where jobs run on hosts that come and go.
        repository: a checkout that has the commit; else the first that does, of those around the working
            folder and the results and that of spbench's own code.
        branch: else the one that is checked out there.
        commit: else the one that the rows name.
    """

    suite: str | None = None
    machine: str | None = None
    repository: Path | None = None
    branch: str | None = None
    commit: str | None = None


def record_of(path: Path, naming: Naming) -> RunRecord:
    """The record of the results in a file or folder (:func:`read_results`).

    Raises:
        UserError: the results cannot be read, are of a changed checkout, of several commits or, where they
            were timed, of several machines; or their commit or branch is not known.
    """
    suite = _suite(path, naming.suite)
    rows = list(read_results(path).cells.values())
    check_same_code({suite: rows})
    commit = _commit(naming, commit_of(rows[0]), path)
    machine = dict(_machine(suite, rows))
    if naming.machine is not None:
        machine["host"] = naming.machine
    cells = {}
    for row in rows:
        cells[row["key"]] = CellRecord(row["key"], row["status"], has_exact_engine(row), readings(row))
    return RunRecord(suite, _date(rows) or commit.date, commit, machine, _versions(rows[0]), cells)


def add_record(record: RunRecord, folder: Path) -> tuple[Path, bool]:
    """Write a record into a history; returns its path, and False where it was there already.

    Recording the same run again changes nothing. Another run of the same commit on the same machine has
    another date, and so a file of its own.

    Raises:
        UserError: the file cannot be written, or there is one of that name with other content.
    """
    path = folder / record.file_name
    content = "".join(line + "\n" for line in as_lines(record)).encode()
    if path.exists():
        if path.read_bytes() != content:
            raise UserError(f"{path} has another record of that suite, commit, machine and second; remove it")
        return path, False
    return write_whole(path, content), True


def _commit(naming: Naming, made_by: str, results: Path) -> Commit:
    """The commit that the results name, never the one that is checked out now.

    Raises:
        UserError: they name none, no repository has it, or its branch is not known.
    """
    wanted = naming.commit or made_by
    if not wanted:
        raise UserError("the results do not say which commit they are of; name it by --commit")
    folder = results if results.is_dir() else results.parent
    places = [naming.repository] if naming.repository else [Path.cwd(), folder, own_checkout() or folder]
    options = ("show", "--no-patch", "--format=%H %cI", "--end-of-options")
    for place in places:
        if shown := asked(place, *options, f"{wanted}^{{commit}}"):
            break
    else:
        raise UserError(
            f"{naming.repository or 'no repository here'} has no commit {wanted}, which made the results; "
            "fetch it, or name the repository that was measured by --repository"
        )
    branch = naming.branch or asked(place, "branch", "--show-current")
    if not branch:
        raise UserError(f"{place} is on no branch; name that of the record by --branch")
    commit_hash, date = shown.split()
    return Commit(commit_hash, utc(date), branch)


def _date(rows: Sequence[Row]) -> str | None:
    """When the last cell ended; None where no row says."""
    try:
        return max((utc(str(row["time"])) for row in rows if row.get("time")), default=None)
    except ValueError as error:
        raise UserError(f"a row has a time that is no date: {error}") from error


def _suite(path: Path, given: str | None) -> str:
    given = suite_of(path) if given is None else given
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(_[A-Za-z0-9.-]+)*", given):
        raise UserError(f"suite {given!r}: give --suite a name of letters, digits, '.', '-' and '_'")
    return given


def _machine(suite: str, rows: Sequence[Row]) -> Mapping[str, Any]:
    """The machine of the timed rows; where none was timed, that of the first."""
    timed = [row for row in rows if not has_exact_engine(row)]
    machines = [_machine_of(row) for row in timed or rows[:1]]
    if other := next((machine for machine in machines if machine != machines[0]), None):
        raise UserError(
            f"{suite}: cells were timed on {machines[0].get('host')} and on {other.get('host')}, or one of "
            "them has changed meanwhile; run again with --fresh"
        )
    return machines[0]


def _machine_of(row: Row) -> dict[str, Any]:
    provenance = row.get("provenance") or {}
    named = {name: provenance[name] for name in ("host", "cpu") if provenance.get(name)}
    machine = {**named, **(provenance.get("machine") or {})}
    devices = [rank.get("device") for rank in row["measurement"].get("ranks") or ()]
    gpus = [device for device in devices if device not in (None, "cpu")]
    # without NVIDIA's management library, what torch calls the GPUs of the ranks
    return machine if machine.get("gpus") or not gpus else {**machine, "gpus": gpus}


def _versions(row: Row) -> dict[str, str | None]:
    provenance = row.get("provenance") or {}
    return {name: version for name, version in provenance.items() if name not in _NO_VERSIONS}
