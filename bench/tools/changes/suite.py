"""A suite: the results of one run as exports see them, with their origins and what they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.git import DIRTY, SHORT_HASH, full_commit, last_change
from spbench.bench.measure.sweep.provenance import commit_of
from spbench.bench.measure.sweep.results import RESULTS_FILE, Row
from spbench.bench.tools.changes.gate import check_gate
from spbench.bench.tools.changes.judgement import Judgement, judge
from spbench.bench.tools.changes.metrics import Reading, readings
from spbench.bench.tools.changes.result_files import Results, read_results, suite_of

#: of cells whose numbers say something: as in the gate
WITH_VALUES = ("ok", "oom")


@dataclass(frozen=True)
class Origin:
    """Where a row comes from; "" stands for what is not known.

    Attributes:
        commit: that the row stands for, in full where git knows it.
        dirty: files had changes that were not committed.
        host: the name of the machine.
        machine: its facts, as :func:`machine_facts` has them; older rows and pytest-benchmark have few.
        versions: of ``python``, ``torch`` and ``spbench``, as far as they are known.
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
        """The commit for people."""
        return f"{self.commit[:SHORT_HASH]}{DIRTY if self.dirty else ''}" if self.commit else "unknown"


def origin_of(row: Row, results: Path, commit: str = "") -> Origin:
    """Where a row comes from. Rows of baselines do not say: their commit is the one in which their file last
    changed.

    Args:
        results: the file or folder that it was read from.
        commit: in place of the one in the row.
    """
    made_by = row.get("provenance") or {}
    named = commit or commit_of(row)
    digits = named.removesuffix(DIRTY)
    return Origin(
        commit=full_commit(digits, results) if digits else "" if made_by else last_change(results),
        dirty=named.endswith(DIRTY),
        host=made_by.get("host") or "",
        machine=made_by.get("machine") or {"cpu": made_by.get("cpu")},
        versions={name: made_by[name] for name in ("python", "torch", "spbench") if made_by.get(name)},
        time=row.get("time") or "",
    )


@dataclass(frozen=True)
class Suite:
    """Results under a name.

    Attributes:
        name: the name of their folder, or of their file without its ending: the same from run to run.
        base: what they are compared with; None for nothing.
        previous_base: the base before the change that made the results; None if it is not known.
        commit: of all rows, in place of what they say; "" for what they say.
    """

    name: str
    results: Results
    base: Results | None = None
    previous_base: Results | None = None
    commit: str = ""

    @cached_property
    def judgement(self) -> Judgement | None:
        """What the gate says; None without a base."""
        return judge(self.base, self.results) if self.base else None

    @cached_property
    def meant(self) -> Judgement | None:
        """How the base differs from what it was before; None if that is not known."""
        return judge(self.previous_base, self.base) if self.previous_base and self.base else None

    @property
    def rows(self) -> Sequence[Row]:
        return list(self.results.cells.values())

    def origin(self, row: Row) -> Origin:
        """Where a row of the results comes from."""
        return origin_of(row, self.results.path, self.commit)

    def values(self) -> Iterator[tuple[Row, Reading]]:
        """The rows and readings of the cells that have numbers, in the order of the rows and of
        :data:`METRICS`."""
        for row in self.rows:
            if row["status"] in WITH_VALUES:
                for reading in readings(row).values():
                    if reading.is_finite:
                        yield row, reading


def read_suites(
    paths: Sequence[Path], base: Path | None, previous_base: Path | None, commit: str = ""
) -> list[Suite]:
    """The results at these paths (see :func:`read_results`).

    Args:
        base: the base of the results; or a folder with a base for each, under the names of the results.
        previous_base: likewise; results that it has no base for are new to it.

    Raises:
        UserError: something cannot be read, results have no base, two results have one name, or the gate
            does not judge them (:func:`check_gate`).
    """
    places: dict[str, Path] = {}
    for path in paths:
        if other := places.get(suite_of(path)):
            raise UserError(f"{other} and {path} are both called {suite_of(path)!r}; rename one of them")
        places[suite_of(path)] = path
    suites = []
    for name, path in places.items():
        before = base and read_results(_base_of(name, base, alone=len(places) == 1))
        previous = None
        if previous_base and (len(places) == 1 or _is_results(previous_base / name)):
            place = _base_of(name, previous_base, alone=True)
            previous = read_results(place) if _is_results(place) or not place.is_dir() else None
        results = read_results(path, judged=base is not None)
        if before:
            check_gate(before, results)
        suites.append(Suite(name, results, before or None, previous, commit))
    return suites


def not_run(paths: Sequence[Path], base: Path | None) -> list[str]:
    """The names of those in a folder of bases of which there are no results."""
    if base is None or _is_results(base):
        return []
    names = {path.parent.name for path in base.glob(f"*/{RESULTS_FILE}")}
    return sorted(names - {suite_of(path) for path in paths})


def _base_of(name: str, base: Path, *, alone: bool) -> Path:
    """The place of the base of the results called ``name``."""
    return base / name if _is_results(base / name) or not alone else base


def _is_results(path: Path) -> bool:
    return (path / RESULTS_FILE).is_file()
