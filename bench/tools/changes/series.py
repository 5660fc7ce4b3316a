"""Series, the values of one metric of one cell over commits, and steps, the changes of a series' level: each
between two commits, for better or worse.

An exact metric has a step at every change of its value, between two neighbouring commits. A measured metric
has a step at each change point among its medians (:mod:`tools.changes.change_points`).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from spbench.bench.tools.changes.change_points import ChangePoint, change_points
from spbench.bench.tools.changes.metrics import METRICS, STATUSES, Metric, Reading, has_exact_engine, readings
from spbench.bench.tools.changes.record_command import Commit, RunRecord
from spbench.bench.units import six_digits
from spbench.plots.series import grouped

#: the metric of a cell's status; its values are indices into :data:`SHOWN_STATUSES`
STATUS = Metric("status", "", "smaller")

#: from best to worst; "missing": a machine that recorded the cell before has not recorded it this time
SHOWN_STATUSES = (*STATUSES, "missing")

#: the present value of a measured metric is the median of so many newest values
_NEWEST = 3

#: the least relative change written in percent, because a smaller change would be written as +0.00%
_LEAST_PERCENT = 1e-4

_PLACES = {metric.name: place for place, metric in enumerate((STATUS, *METRICS))}


@dataclass(frozen=True)
class Point:
    """The value of a series at a commit.

    Attributes:
        value: for a measured metric, the median over the records of this commit; for an exact metric, the
            value in the newest record.
        samples: for a measured metric, the samples in all records of this commit; else empty.
        software: versions of libraries, the system and the GPU's driver, from the newest record.
    """

    commit: Commit
    value: float
    samples: tuple[float, ...]
    software: dict[str, str]


@dataclass(frozen=True)
class Series:
    """A metric of a cell over the commits of a branch, in the order of their dates.

    Attributes:
        machine: :attr:`RunRecord.machine_name`; empty if the metric is exact, because all machines then have
            the same values.
        unit: the unit of values; empty for a status, whose values are indices into :data:`SHOWN_STATUSES`.
        points: one point for each commit that has a value; at least one.
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
        """The present value: the newest value, or for a measured metric the median of the newest three, so
        that one bad night does not change the present value."""
        return statistics.median(point.value for point in self.points[-1 if self.exact else -_NEWEST :])

    def spelled(self, value: float) -> str:
        """A value as text without its unit: a status as its word, any other value with six digits."""
        return SHOWN_STATUSES[int(value)] if self.metric is STATUS else six_digits(value)

    def difference(self, before: float, after: float) -> str:
        """A change as text: in percent, or in the series' unit where the change is below 0.01%; for a status,
        both statuses; "" if the values are equal."""
        if before == after:
            return ""
        if self.metric is STATUS:
            return f"{self.spelled(before)} to {self.spelled(after)}"
        change = (after - before) / abs(before) if before else math.inf
        if _LEAST_PERCENT <= abs(change) < math.inf:
            return f"{change:+.2%}"
        return f"{after - before:+.6g} {self.unit}".strip()


class _Key(NamedTuple):
    suite: str
    cell: str
    place: int
    machine: str
    exact: bool


def series_of(records: Sequence[RunRecord]) -> list[Series]:
    """All series of some records, sorted by suite and cell; the first series of each cell is its status.

    Args:
        records: records of one branch, in the order of commits.
    """
    values: dict[_Key, list[tuple[RunRecord, Reading]]] = defaultdict(list)
    for suite, runs in grouped(records, lambda record: record.suite).items():
        for record, cell, machine, status in _statuses(runs):
            reading = Reading(STATUS, SHOWN_STATUSES.index(status), "", exact=True)
            values[_Key(suite, cell, _PLACES[STATUS.name], machine, True)].append((record, reading))
        for record in runs:
            for row in record.rows:
                for name, reading in readings(row).items():
                    machine = "" if reading.exact else record.machine_name
                    key = _Key(suite, row["key"], _PLACES[name], machine, reading.exact)
                    values[key].append((record, reading))
    return [_series(key, values[key]) for key in sorted(values)]


def _statuses(records: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, str, str, str]]:
    """For each commit of a suite and each cell: record, cell key, machine ("": all machines) and status.

    The status is "missing" where a machine that recorded the cell earlier has a record of this commit without
    the cell, and no other machine's record of this commit has the cell."""
    earlier: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for _, runs in groupby(records, key=lambda record: record.commit.hash):
        present: dict[tuple[str, str], tuple[RunRecord, str]] = {}
        expected: dict[tuple[str, str], RunRecord] = {}
        for record in runs:
            machine = record.machine_name
            expected |= dict.fromkeys(earlier[machine], record)
            cells = {
                (row["key"], "" if has_exact_engine(row) else machine): (record, row["status"])
                for row in record.rows
            }
            earlier[machine] |= cells.keys()
            present |= cells
        missing = {key: (record, "missing") for key, record in expected.items() if key not in present}
        for (cell, machine), (record, status) in (present | missing).items():
            yield record, cell, machine, status


def _series(key: _Key, values: Sequence[tuple[RunRecord, Reading]]) -> Series:
    points = []
    for _, group in groupby(values, key=lambda value: value[0].commit.hash):
        of_commit = list(group)
        record, newest = of_commit[-1]
        value = newest.value if key.exact else statistics.median(reading.value for _, reading in of_commit)
        samples = tuple(sample for _, reading in of_commit for sample in reading.samples)
        points.append(Point(record.commit, value, samples, record.software))
    about = values[-1][1]
    return Series(key.suite, key.machine, key.cell, about.metric, about.unit, key.exact, tuple(points))


# -- steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A change of a series' level.

    Attributes:
        last_before, first_after: the step came with a commit after ``last_before``, up to and including
            ``first_after``; for a measured metric with 95% confidence. For a drift: its first and last point.
        before, after: the levels, in the unit of the series.
        verdict: whether the new level is worse or better.
        drift: whether a measured metric went from one level to the other little by little.
        meant: the reason why the step is accepted (:class:`Acceptance`); empty if nobody has accepted it.
    """

    last_before: Point
    first_after: Point
    before: float
    after: float
    verdict: Literal["regression", "improvement"]
    drift: bool = False
    meant: str = ""

    @property
    def commit_range(self) -> str:
        """The range of commits that contains the cause of the step, for ``git log``: ``A..B``."""
        return f"{self.last_before.commit.short}..{self.first_after.commit.short}"

    @property
    def change(self) -> float:
        """The difference of the levels as a share of the old level; infinite if the old level is zero."""
        difference = self.after - self.before
        return difference / abs(self.before) if self.before else math.copysign(math.inf, difference)

    @property
    def also_changed(self) -> dict[str, tuple[str | None, str | None]]:
        """The versions (of libraries, the system, the GPU's driver) that changed with the step: (before,
        after) by name; None for a name without a version."""
        before, after = self.last_before.software, self.first_after.software
        return {
            name: (before.get(name), after.get(name))
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        }


def steps(series: Series) -> list[Step]:
    """The steps of a series, the earliest first, without reasons (``meant`` is empty)."""
    values, tolerance = [point.value for point in series.points], series.metric.tolerance
    return [
        Step(
            series.points[change.last_before],
            series.points[change.first_after],
            change.before,
            change.after,
            "regression" if series.metric.excess(change.before, change.after) > 0 else "improvement",
            change.drift,
        )
        for change in (_exact_changes(values, tolerance) if series.exact else change_points(values))
    ]


def _exact_changes(values: Sequence[float], tolerance: float) -> Iterator[ChangePoint]:
    level = values[0]
    for place, value in enumerate(values):
        # compared with the beginning of a level, so that changes below the tolerance do not add up unseen
        if abs(value - level) > tolerance * abs(level):
            yield ChangePoint(place - 1, place, level, value)
            level = value
