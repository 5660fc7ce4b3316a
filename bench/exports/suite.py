"""A suite: the results of one run as exports see them, with their origins and what they are held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.exports.origin import Origin, origin_of
from spbench.bench.regressions.metrics import Reading, readings
from spbench.bench.regressions.regressions import Judgement, judge
from spbench.bench.regressions.result_files import Results, read_results, suite_of
from spbench.bench.sweep.results import RESULTS_FILE, Row

#: of cells whose numbers say something: as in the gate
WITH_VALUES = ("ok", "oom")


@dataclass(frozen=True)
class Suite:
    """Results under a name.

    Attributes:
        name: the name of their folder, or of their file without its ending: the same from run to run.
        base: what they are held against; None for nothing.
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
                    yield row, reading


def read_suites(
    paths: Sequence[Path], base: Path | None, previous_base: Path | None, commit: str = ""
) -> list[Suite]:
    """The results at these paths (see :func:`read_results`).

    Args:
        base: the base of the results; or a folder with a base for each, under the names of the results.
        previous_base: likewise; results that it has no base for are new to it.

    Raises:
        UserError: something cannot be read, results have no base, or two results have one name.
    """
    places: dict[str, Path] = {}
    for path in paths:
        if other := places.get(suite_of(path)):
            raise UserError(f"{other} and {path} are both called {suite_of(path)!r}; rename one of them")
        places[suite_of(path)] = path
    suites = []
    for name, path in places.items():
        held_against = base and read_results(_base_of(name, base, alone=len(places) == 1))
        previous = None
        if previous_base and (len(places) == 1 or _is_results(previous_base / name)):
            place = _base_of(name, previous_base, alone=True)
            previous = read_results(place) if _is_results(place) or not place.is_dir() else None
        suites.append(Suite(name, read_results(path), held_against or None, previous, commit))
    return suites


def _base_of(name: str, base: Path, *, alone: bool) -> Path:
    """The place of the base of the results called ``name``."""
    return base / name if _is_results(base / name) or not alone else base


def _is_results(path: Path) -> bool:
    return (path / RESULTS_FILE).is_file()
