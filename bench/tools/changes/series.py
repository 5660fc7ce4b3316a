"""Series: the values of one metric of one cell over commits."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from spbench.bench.tools.changes.metrics import METRICS, STATUSES, Metric, Reading
from spbench.bench.tools.changes.run_record import Commit, RunRecord

#: the metric of a cell's status; its values are places in :data:`SHOWN_STATUSES`
STATUS = Metric("status", "", "smaller")

#: from best to worst; "missing": a machine that recorded the cell before has not recorded it this time
SHOWN_STATUSES = (*STATUSES, "missing")

#: the present value of a measured metric is the median of so many of the newest
_NEWEST = 3

#: the place of each metric among those of a cell; metrics that are not here come after these
_PLACES = {metric.name: place for place, metric in enumerate((STATUS, *METRICS))}


@dataclass(frozen=True)
class Point:
    """A value at a commit.

    Attributes:
        value: of a measured metric, the median over the records of this commit; of an exact one, that of the
            newest record.
        samples: of a measured metric, those of all these records; else empty.
        software: versions of libraries, of the system and of the GPU's driver, by the newest record.
    """

    commit: Commit
    value: float
    samples: tuple[float, ...]
    software: dict[str, str]


@dataclass(frozen=True)
class Series:
    """A metric of a cell over the commits of a branch, in the order of their dates.

    Attributes:
        machine: :attr:`RunRecord.machine_name`; empty if the metric is exact, as all machines have the same
            values then.
        unit: of the values; empty of a status, whose values are places in :data:`SHOWN_STATUSES`.
        points: one a commit; commits without a value are left out. At least one.
    """

    suite: str
    machine: str
    cell: str
    metric: Metric
    unit: str
    exact: bool
    points: tuple[Point, ...]

    @property
    def current(self) -> float:
        """The present value: the newest one, or of a measured metric the median of the newest three, so that
        one bad night alone does not change it."""
        newest = [point.value for point in self.points[-1 if self.exact else -_NEWEST :]]
        return statistics.median(newest)

    def spelled(self, value: float) -> str:
        """A value of the series as people read it, without its unit."""
        if self.metric is STATUS:
            return SHOWN_STATUSES[int(value)]
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.6g}"


@dataclass(frozen=True, order=True)
class _Key:
    suite: str
    cell: str
    place: int
    metric: str
    machine: str
    exact: bool


def series_of(records: Sequence[RunRecord]) -> list[Series]:
    """All series of some records, by suite and cell; the first of each cell is its status.

    Args:
        records: of one branch, in the order of commits.
    """
    found: dict[_Key, list[tuple[RunRecord, Reading]]] = defaultdict(list)
    by_suite: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        by_suite[record.suite].append(record)
    for of_suite in by_suite.values():
        for record, cell, machine, status in _statuses(of_suite):
            value = Reading(STATUS, SHOWN_STATUSES.index(status), "", exact=True)
            found[_key(record, cell, machine, value)].append((record, value))
        for record in of_suite:
            for cell, about in record.cells.items():
                for value in about.values.values():
                    machine = "" if value.exact else record.machine_name
                    found[_key(record, cell, machine, value)].append((record, value))
    return [_series(key, found[key]) for key in sorted(found)]


def _key(record: RunRecord, cell: str, machine: str, value: Reading) -> _Key:
    name = value.metric.name
    return _Key(record.suite, cell, _PLACES.get(name, len(_PLACES)), name, machine, value.exact)


def _statuses(records: Iterable[RunRecord]) -> Iterator[tuple[RunRecord, str, str, str]]:
    """For each commit of a suite and each cell: record, cell, machine ("": all of them) and status.

    The status is "missing" where a machine that recorded the cell earlier has a record of this commit without
    the cell, and no other machine has one with it."""
    earlier: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for _, group in groupby(records, key=lambda record: record.commit.hash):
        found: dict[tuple[str, str], tuple[RunRecord, str]] = {}
        expected: dict[tuple[str, str], RunRecord] = {}
        for record in group:
            machine = record.machine_name
            expected |= dict.fromkeys(earlier[machine], record)
            here = {
                (cell.key, "" if cell.exact else machine): (record, cell.status)
                for cell in record.cells.values()
            }
            earlier[machine] |= here.keys()
            found |= here
        missing = {key: (record, "missing") for key, record in expected.items() if key not in found}
        for (cell, machine), (record, status) in (found | missing).items():
            yield record, cell, machine, status


def _series(key: _Key, values: Sequence[tuple[RunRecord, Reading]]) -> Series:
    points = []
    for _, group in groupby(values, key=lambda value: value[0].commit.hash):
        of_commit = list(group)
        record, newest = of_commit[-1]
        value = newest.value if key.exact else statistics.median(found.value for _, found in of_commit)
        samples = tuple(sample for _, found in of_commit for sample in found.samples)
        points.append(Point(record.commit, value, samples, record.software))
    about = values[-1][1]
    return Series(key.suite, key.machine, key.cell, about.metric, about.unit, key.exact, tuple(points))
