"""`spbench record`: keep the results of a run in a history, as a record. A record is one immutable file with
the rows of one run of a suite, and the commit whose code the run measured.

The file has JSON lines: the head (format, suite, date, commit, host, number of rows), then the rows as the
run wrote them. Nothing is ever appended to a file, and its name is made of suite, date, commit and machine,
so that jobs and branches that write into one history never touch the same file.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spbench.bench.command_line.options import path_option, printed
from spbench.bench.command_line.output import Output
from spbench.bench.errors import UserError
from spbench.bench.files import read_file, write_whole
from spbench.bench.git import SHORT_HASH, asked, own_checkout
from spbench.bench.row import Row, check_same_code, commit_of, json_line, parse_row, problem
from spbench.bench.tools.changes.metrics import has_exact_engine
from spbench.bench.tools.changes.result_files import Origin, origin_of, read_results, suite_of
from spbench.bench.units import GIB

FORMAT = 2
SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Commit:
    """A commit whose code was measured.

    Attributes:
        hash: the full hash.
        date: the committer's date, ISO 8601 in UTC, to the second, so that texts sort as dates.
        branch: the branch on which the commit was measured.
    """

    hash: Annotated[str, Field(pattern="^[0-9a-f]{7,64}$")]
    date: str
    branch: str

    @property
    def short(self) -> str:
        """The first digits of the hash."""
        return self.hash[:SHORT_HASH]


@dataclass(frozen=True)
class RunRecord:
    """One run of one suite.

    Attributes:
        date: when the run ended, in the form of :attr:`Commit.date`.
        rows: at least one row.
        host: the name of the machine, in place of the host that the rows name; "": the rows' host counts.
    """

    suite: str
    date: str
    commit: Commit
    rows: Sequence[Row]
    host: str = ""

    @cached_property
    def origin(self) -> Origin:
        """The origin of the first row whose engine measures times; if there is none, of the first row."""
        return origin_of((_timed(self.rows) or self.rows)[0])

    @property
    def machine_name(self) -> str:
        """The host and a digest of its hardware (processor, cores, GiB of memory, GPUs): timings of two runs
        are comparable only if their machine names are equal."""
        host, facts = self.host or self.origin.host or "unknown", self.origin.machine
        hardware = [facts.get(name) for name in ("cpu", "cores", "gpus")]
        if hardware == [None, None, None]:
            return host
        gib = round((facts.get("memory_bytes") or 0) / GIB)  # kernels keep a few MiB more or less
        return f"{host}-{hashlib.sha256(json.dumps([*hardware, gib]).encode()).hexdigest()[:6]}"

    @property
    def software(self) -> dict[str, str]:
        """The versions of libraries, the system and the GPU's driver, by name: a new version may change a
        number, as a commit may."""
        facts = self.origin.machine
        system = {name: str(facts[name]) for name in ("os", "gpu_driver") if facts.get(name) is not None}
        return {**origin_of(self.rows[0]).versions, **system}

    @property
    def file_name(self) -> str:
        """The name of the record's file: suite, date of the run, commit and machine."""
        date = re.sub(r"[-:]|\+00:00", "", self.date)
        words = (self.suite, f"{date}Z", self.commit.short, self.machine_name)
        return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word) for word in words) + SUFFIX


def utc(date: str) -> str:
    """A date in ISO 8601, converted to UTC, to the second; a date without a time zone is taken as UTC.

    Raises:
        ValueError: the text is no date in ISO 8601.
    """
    parsed = datetime.fromisoformat(date)
    zoned = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    return zoned.astimezone(UTC).isoformat(timespec="seconds")


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not has_exact_engine(row)]


# -- a record of results ---------------------------------------------------------------------------------


def record_of(
    path: Path,
    *,
    suite: str | None = None,
    machine: str | None = None,
    repository: Path | None = None,
    branch: str | None = None,
    commit: str | None = None,
) -> RunRecord:
    """The record of the results in a file or folder (:func:`read_results`).

    Args:
        suite: the name of the suite; default: the name of the results' folder.
        machine: a name that replaces the host's, where jobs run on hosts that come and go.
        repository: a checkout that has the commit; default: the first checkout that has the commit, around
            the working folder, around the results, or of spbench's own code.
        branch: the branch that was measured; default: the branch that the repository has checked out.
        commit: the commit that was measured; default: the commit that the rows name.

    Raises:
        UserError: the results cannot be read, come from a checkout with changes, from several commits or, for
            measured times, from several machines; or their commit or branch is not known.
    """
    suite = suite_of(path) if suite is None else suite
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(_[A-Za-z0-9.-]+)*", suite):
        raise UserError(f"suite {suite!r}: give --suite a name of letters, digits, '.', '-' and '_'")
    rows = list(read_results(path).cells.values())
    check_same_code({suite: rows})
    _check_one_machine(suite, rows)
    measured = _commit(commit or commit_of(rows[0]), branch, repository, path)
    try:
        dates = [utc(str(row["time"])) for row in rows if row.get("time")]
    except ValueError as error:
        raise UserError(f"a row has a time that is no date: {error}") from error
    return RunRecord(suite, max(dates, default=measured.date), measured, rows, machine or "")


def _check_one_machine(suite: str, rows: Sequence[Row]) -> None:
    machines = [(origin.host or None, origin.machine) for origin in map(origin_of, _timed(rows))]
    if other := next((machine for machine in machines if machine != machines[0]), None):
        raise UserError(
            f"{suite}: cells were timed on {machines[0][0]} and on {other[0]}, or one of "
            "them has changed meanwhile; run again with --fresh"
        )


def _commit(name: str, branch: str | None, repository: Path | None, results: Path) -> Commit:
    """The :class:`Commit` called ``name``, with its full hash, date and branch.

    Raises:
        UserError: the name is empty, no repository has the commit, or its branch is not known.
    """
    if not name:
        raise UserError("the results do not name their commit; name it by --commit")
    folder = results if results.is_dir() else results.parent
    places = [repository] if repository else [Path.cwd(), folder, own_checkout() or folder]
    options = ("show", "--no-patch", "--format=%H %cI", "--end-of-options")
    for place in places:
        if line := asked(place, *options, f"{name}^{{commit}}"):
            break
    else:
        raise UserError(
            f"{repository or 'what is here'} has no commit {name}, from which the results come; "
            "fetch it, or name the repository that was measured by --repository"
        )
    branch = branch or asked(place, "branch", "--show-current")
    if not branch:
        raise UserError(f"{place} is on no branch; name that of the record by --branch")
    commit_hash, date = line.split()
    return Commit(commit_hash, utc(date), branch)


# -- the file --------------------------------------------------------------------------------------------


class _Head(BaseModel):
    """The head of a record's file; keys that this class does not have, from later versions, are ignored."""

    model_config = ConfigDict(strict=True)

    spbench_record: int
    suite: str
    date: str
    commit: Commit
    host: str = ""
    cells: int


def content_of(record: RunRecord) -> str:
    """The text of a record's file: JSON lines."""
    about = {name: getattr(record, name) for name in ("suite", "date", "commit", "host")}
    head = _Head(spbench_record=FORMAT, **about, cells=len(record.rows))
    return "".join(map(json_line, (head.model_dump(), *record.rows)))


def add_record(record: RunRecord, folder: Path) -> tuple[Path, bool]:
    """Write a record into a history; return its path, and whether the file is new.

    Recording the same run again changes nothing. Another run of the same commit on the same machine has
    another date, so that it gets a file of its own.

    Raises:
        UserError: the file cannot be written, or a file of that name has other content.
    """
    path = folder / record.file_name
    if not path.exists():
        return write_whole(path, content_of(record)), True
    if content_of(read_record(path)) != content_of(record):
        raise UserError(f"{path} has another record of that suite, commit, machine and second; remove it")
    return path, False


def read_record(path: Path) -> RunRecord:
    """Read a record's file.

    Raises:
        UserError: the file cannot be read, or is not a whole record; the message has the line and field.
    """
    first, *lines = read_file(path).splitlines(keepends=True) or [b""]
    number = 1
    rows = []
    try:
        head = _Head.model_validate_json(first)
        if head.spbench_record != FORMAT:
            raise ValueError(f"spbench_record: a record of format {head.spbench_record}; this reads {FORMAT}")
        commit, date = replace(head.commit, date=utc(head.commit.date)), utc(head.date)
        for line in lines:
            number += 1
            rows.append(parse_row(line))
        if len(rows) != head.cells or not rows or not lines[-1].endswith(b"\n"):
            raise ValueError(f"cut short: {len(rows)} of {head.cells} cells")
    except (ValueError, OverflowError) as error:
        what = problem(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(
            f"{path}:{number}: not a record of a run ({what}); restore the file or remove it"
        ) from error
    return RunRecord(head.suite, date, commit, rows, head.host)


@click.command("record")
@click.argument("results", type=click.Path(path_type=Path))
@path_option("--history", "Folder; created if need be.", required=True)
@click.option("--suite", help="Name of the suite; by default the name of the results' folder.")
@click.option(
    "--machine",
    metavar="NAME",
    help="Name of the machine, for jobs whose hosts change; by default the host's name. Times are compared "
    "only with times of the same name and hardware.",
)
@click.option("--commit", help="Commit that was measured; by default the commit that the results name.")
@path_option(
    "--repository",
    "Repository that has the commit; by default the one around the working folder or the results.",
)
@click.option("--branch", help="Branch that was measured; by default the branch that is checked out.")
@printed
def command(results: Path, history: Path, **naming: Any) -> Output:
    """Keep RESULTS as a file in a history.

    The file has commit and machine too. RESULTS is a folder with cells.jsonl, such as results/runs/gate, or a
    file of pytest-benchmark. Results of uncommitted changes, or of several commits, are refused. Recording
    the same run again changes nothing.
    """
    record = record_of(results, **naming)
    path, is_new = add_record(record, history)
    about = {
        "suite": record.suite,
        "commit": record.commit.hash,
        "date": record.commit.date,
        "branch": record.commit.branch,
        "machine": record.machine_name,
        "cells": len(record.rows),
        "recorded": is_new,
    }
    what = f"{len(record.rows)} cells of {record.suite} at {record.commit.short} ({record.commit.branch})"
    note = f"{what} on {record.machine_name}: {'recorded' if is_new else 'were recorded already'}"
    return Output(content={**about, "file": str(path)}, records=[about], notes=[note], files=[path])
