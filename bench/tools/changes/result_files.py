"""Results as comparisons read them: rows of spbench, or benchmarks from JSON files of pytest-benchmark.

Each benchmark becomes a row: its full name is the key, its median time (in seconds) the metric ``time_s``,
with the samples of all its rounds where the file has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import AliasPath, BaseModel, Field, ValidationError

from spbench.bench.errors import UserError
from spbench.bench.files import parse_json, read_file, resolved
from spbench.bench.git import DIRTY, SHORT_HASH, full_commit, last_change
from spbench.bench.measure import RESULTS_FILE, read_all_rows, read_new_rows
from spbench.bench.measurement import Measured, Number
from spbench.bench.row import COMMITS, Row, commit_of, problem
from spbench.bench.tools.changes.metrics import has_exact_engine, merged_rounds
from spbench.bench.tools.papers.comparison import COMPARISON_FILE, NUMBERS, read_records

Claims = dict[tuple[str, ...], Mapping[str, Any]]

#: the keys of a row's provenance that are not versions of libraries
_NO_VERSIONS = (*COMMITS, "tree", "host", "cpu", "machine")

#: the libraries whose versions come first
_FIRST = ("python", "torch", "spbench")

#: the engine of rows from pytest-benchmark; no engine of spbench has this name
PYTEST_BENCHMARK = "pytest-benchmark"


@dataclass(frozen=True)
class Results:
    """Results of a run, as one side of a comparison.

    Attributes:
        path: the file or folder that the results were read from.
        cells: rows by cell key.
        claims: the rows of comparison.csv by claim, variant, numerator and denominator; None: there is no
            comparison.csv.
        notes: a line for each part that the files lack.
        not_finite: the fields of rows whose numbers are not finite, by cell key; only with ``judged``.
        commit: the commit of all rows, whatever the rows say; "": each row says its own.
    """

    path: Path
    cells: Mapping[str, Row]
    claims: Claims | None = None
    notes: Sequence[str] = ()
    not_finite: Mapping[str, Sequence[str]] = field(default_factory=dict)
    commit: str = ""

    @property
    def name(self) -> str:
        """The name of the results' suite (:func:`suite_of`), the same from run to run."""
        return suite_of(self.path)

    @property
    def rows(self) -> Sequence[Row]:
        """The rows in the order of the file."""
        return list(self.cells.values())

    @property
    def commits(self) -> list[str]:
        """The commits that rows name, in the order in which they first appear; if no row names a commit, the
        commit that changed the file last, if git knows it."""
        named = filter(None, dict.fromkeys(map(commit_of, self.cells.values())))
        return list(named) or list(filter(None, [last_change(self.path)[:SHORT_HASH]]))

    @property
    def machines(self) -> list[str]:
        """The names of the machines that made the rows, in the order in which they first appear."""
        return list(dict.fromkeys(origin_of(row).machine_name for row in self.cells.values()))

    def origin(self, row: Row) -> Origin:
        """The origin of one of the results' rows: machine, versions and commit."""
        return origin_of(row, self.path, self.commit)

    @property
    def shown_origin(self) -> str:
        """The commits, versions of torch and machines of the rows as text, such as "0123456789ab, torch
        2.13.0, any machine": exact engines give the same numbers on any machine."""
        origins = list(map(self.origin, self.rows))
        commits = dict.fromkeys(origin.shown_commit for origin in origins)
        torch = dict.fromkeys(f"torch {o.versions['torch']}" for o in origins if "torch" in o.versions)
        machines = dict.fromkeys(
            "any machine" if has_exact_engine(row) else origin.host or "unknown machine"
            for row, origin in zip(self.rows, origins, strict=True)
        )
        return ", ".join(" and ".join(words) for words in (commits, torch, machines) if words)


@dataclass(frozen=True)
class Origin:
    """The code, machine and versions of libraries that made a row; a text that is not known is "".

    Attributes:
        commit: the commit that was measured, with its full hash if git was asked and knows it.
        dirty: whether files had changes that were not committed.
        host: the name of the machine.
        machine: facts from :func:`machine_facts`; older rows and those of pytest-benchmark have few facts.
        versions: the known versions of libraries, by library.
        time: when the cell ended, ISO 8601.
    """

    commit: str = ""
    dirty: bool = False
    host: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    time: str = ""

    @property
    def shown_commit(self) -> str:
        """The short hash, with a suffix if files had changes; "unknown" without a commit."""
        return f"{self.commit[:SHORT_HASH]}{DIRTY if self.dirty else ''}" if self.commit else "unknown"

    @property
    def machine_name(self) -> str:
        """Host, processor and GPUs, such as "vm (Intel Xeon Processor, NVIDIA H100)", as far as known."""
        host, *hardware = self._machine
        # signs of trademarks and the clock rate are left out
        parts = [
            re.sub(r"\((?:R|TM|C)\)| CPU(?= |$)| @.*", "", part, flags=re.IGNORECASE) for part in hardware
        ]
        about = ", ".join(" ".join(part.split()) for part in parts if part)
        return f"{host} ({about})" if host and about else host or about

    @property
    def _machine(self) -> tuple[str, str, str]:
        return self.host, self.machine.get("cpu") or "", ", ".join(self.machine.get("gpus") or ())

    def is_same_machine(self, other: Origin) -> bool:
        """Whether both origins have the same host, and the same processor and GPUs where both name them."""
        pairs = list(zip(self._machine, other._machine, strict=True))
        return all(pairs[0]) and all(one == another for one, another in pairs if one and another)


def origin_of(row: Row, results: Path | None = None, commit: str = "") -> Origin:
    """The origin of a row.

    Args:
        results: the file or folder that the row was read from; None: git is not asked. A row of a baseline
            names no commit, so its commit is the one in which the file last changed.
        commit: replaces the commit in the row unless it is "".
    """
    provenance = row.get("provenance") or {}
    name = commit or commit_of(row)
    digits = name.removesuffix(DIRTY)
    if results is not None:
        digits = full_commit(digits, results) if digits else "" if provenance else last_change(results)
    facts = {name: fact for name, fact in provenance.items() if name == "cpu" and fact}
    facts |= provenance.get("machine") or {}
    devices = [rank.get("device") for rank in row["measurement"].get("ranks") or ()]
    # without NVIDIA's management library, the GPUs have the names that torch gives to the ranks' devices
    if not facts.get("gpus") and (gpus := [device for device in devices if device not in (None, "cpu")]):
        facts["gpus"] = gpus
    libraries = [name for name in dict.fromkeys((*_FIRST, *provenance)) if name not in _NO_VERSIONS]
    versions = {name: version for name in libraries if (version := provenance.get(name))}
    host, time = provenance.get("host") or "", row.get("time") or ""
    return Origin(digits, name.endswith(DIRTY), host, facts, versions, time)


def suite_of(path: Path) -> str:
    """The name of the results at a path: the name of their folder, or of their file without its ending."""
    place = resolved(path)
    if place.is_dir():
        return place.name
    return place.parent.name if place.name == RESULTS_FILE else place.stem


def read_results(path: Path, *, judged: bool = False, commit: str = "") -> Results:
    """Read a cells.jsonl, or a folder with one and, perhaps, a comparison.csv; or a JSON file of
    pytest-benchmark, or a folder of such files of one commit, each of which is a round.

    Args:
        judged: keep numbers that are not finite, so that the gate can report them, instead of refusing.
        commit: the commit of all rows, whatever the rows say; "": each row says its own.

    Raises:
        UserError: a file is missing, cannot be read or has a line that is not a row, or there is no row.
    """
    cells = path / RESULTS_FILE if path.is_dir() else path
    not_finite: Mapping[str, Sequence[str]] = {}
    notes: Sequence[str] = ()
    if benchmarks := _benchmarks(path):
        rows, notes = _rows_of_benchmarks(benchmarks)
        by_key = {row["key"]: row for row in rows}
    elif not cells.is_file():
        raise UserError(f"cannot read {cells}: no such file; name one, or a folder with {RESULTS_FILE}")
    elif judged:
        by_key, not_finite = read_new_rows(cells)
    else:
        by_key = {row["key"]: row for row in read_all_rows(cells)}
    if not by_key:
        raise UserError(f"{cells} has no rows, so that nothing can be compared")
    claims = path / COMPARISON_FILE
    read = _read_claims(claims, judged) if claims.is_file() else None
    return Results(path, by_key, read, notes, not_finite, commit)


def _read_claims(path: Path, judged: bool) -> Claims:
    name = ("claim", "variant", "numerator", "denominator")
    needed = (*name, *NUMBERS, "status_published", "status_reproduced")
    rows = read_records(path, needed, any_number=judged)
    return {tuple(row[column] for column in name): row for row in rows}


# -- pytest-benchmark ------------------------------------------------------------------------------------


class _Benchmark(BaseModel):
    name: str
    fullname: str
    group: str | None = None
    median: Number = Field(validation_alias=AliasPath("stats", "median"))
    data: list[Number] | None = Field(None, validation_alias=AliasPath("stats", "data"))


class _BenchmarksFile(BaseModel):
    benchmarks: list[_Benchmark]
    host: str | None = Field(None, validation_alias=AliasPath("machine_info", "node"))
    python: str | None = Field(None, validation_alias=AliasPath("machine_info", "python_version"))
    cpu: str | None = Field(None, validation_alias=AliasPath("machine_info", "cpu", "brand_raw"))
    commit: str | None = Field(None, validation_alias=AliasPath("commit_info", "id"))
    dirty: bool | None = Field(None, validation_alias=AliasPath("commit_info", "dirty"))
    datetime: str | None = None


def _benchmarks(path: Path) -> dict[Path, _BenchmarksFile]:
    """The content of pytest-benchmark's files by path: of the file ``path``, or of all such files in a folder
    without a cells.jsonl; empty if there are none.

    Raises:
        UserError: a file has benchmarks, but not in the form that pytest-benchmark writes.
    """
    if path.is_dir():
        files = [] if (path / RESULTS_FILE).exists() else sorted(path.glob("*.json"))
    else:
        files = [path] if path.is_file() else []
    read = {}
    for file in files:
        try:
            content = parse_json(file, read_file(file))
        except UserError:
            continue
        if isinstance(content, dict) and "benchmarks" in content:
            try:
                read[file] = _BenchmarksFile.model_validate(content)
            except ValidationError as error:
                what = f"as what pytest-benchmark writes: {problem(error)}"
                raise UserError(f"cannot read {file} {what}") from error
    return read


def _rows_of_benchmarks(files: Mapping[Path, _BenchmarksFile]) -> tuple[list[Row], list[str]]:
    """The rows of the benchmarks in files, and notes on samples that the files lack. Several files are rounds
    of the same benchmarks, in the order of their times.

    Raises:
        UserError: the files are of several commits or machines.
    """
    rounds = [list(_rows(content)) for content in files.values()]
    first = next(iter(files))
    if len({tuple(row["provenance"].values()) for rows in rounds for row in rows}) > 1:
        raise UserError(
            f"{first.parent} has benchmarks of several commits or machines; a folder is taken for rounds "
            "of one, so name one file or keep them in a folder each"
        )
    lacking = sum("time_samples_s" not in row["measurement"] for row in rounds[0])
    notes = [f"{lacking} benchmarks of {first} have no samples; --benchmark-save-data keeps them"]
    rounds.sort(key=lambda rows: rows[0]["time"] if rows else "")
    return merged_rounds(rounds) if len(rounds) > 1 else rounds[0], notes if lacking else []


def _rows(content: _BenchmarksFile) -> Iterator[Row]:
    made_by = (content.commit or "")[:SHORT_HASH]
    commit = f"{made_by}{DIRTY}" if made_by and content.dirty else made_by or None
    for benchmark in content.benchmarks:
        times: dict[str, Any] = {"time_s": benchmark.median, "time_samples_s": benchmark.data}
        yield Row(
            key=benchmark.fullname,
            cell={"engine": PYTEST_BENCHMARK, "model": benchmark.name, "group": benchmark.group or ""},
            status="ok",
            reason="",
            measurement=Measured(**{name: value for name, value in times.items() if value not in (None, [])}),
            time=content.datetime or "",
            provenance={"commit": commit, **content.model_dump(include={"python", "host", "cpu"})},
        )
