"""Steps: where the level of a series changed, between which commits, and whether for the better.

Of an exact metric every change of the value is a step, between two neighbouring commits. Of a measured one
the change points among the medians are (:mod:`tools.changes.change_points`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spbench.bench.tools.changes.change_points import MINIMUM_EFFECT, change_points
from spbench.bench.tools.changes.series import Point, Series


@dataclass(frozen=True)
class Step:
    """A change of level.

    Attributes:
        last_before, first_after: it came with a commit after the first of these, up to and with the second;
            of a measured metric with 95% confidence. Of a drift: where that begins and ends.
        before, after: the levels, in the unit of the series.
        verdict: whether the new level is worse or better.
        drift: a measured metric went from one level to the other little by little.
        meant: the reason why it is accepted (:class:`Acceptance`); empty if nobody has accepted it.
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
        """What git takes for the commits of which one made the step, such as ``git log A..B``."""
        return f"{self.last_before.commit.short}..{self.first_after.commit.short}"

    @property
    def change(self) -> float:
        """The new level over the old one, minus one; infinite beside an old one of zero."""
        difference = self.after - self.before
        return difference / abs(self.before) if self.before else math.copysign(math.inf, difference)

    @property
    def also_changed(self) -> dict[str, tuple[str | None, str | None]]:
        """What else was different after the step: versions of libraries, of the system and of the GPU's
        driver, before and after; None: not there."""
        before, after = self.last_before.software, self.first_after.software
        return {
            name: (before.get(name), after.get(name))
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        }


def steps(series: Series) -> list[Step]:
    """The steps of a series, the earliest first; none is said to be meant."""
    return _exact_steps(series) if series.exact else _measured_steps(series)


def standing_regressions(all_steps: Sequence[Step], series: Series) -> list[Step]:
    """Those steps of a series that are regressions and were not undone: the last level is still worse than
    the one before them, by more than the metric's tolerance, or of a measured one by
    :data:`MINIMUM_EFFECT`."""
    tolerance = series.metric.tolerance if series.exact else MINIMUM_EFFECT
    return [
        step
        for step in all_steps
        if step.verdict == "regression" and series.metric.excess(step.before, all_steps[-1].after) > tolerance
    ]


def _exact_steps(series: Series) -> list[Step]:
    changes = []
    last = level = series.points[0]
    for point in series.points[1:]:
        # beside the beginning of a level, so that changes below the tolerance do not add up unseen
        if abs(point.value - level.value) > series.metric.tolerance * abs(level.value):
            changes.append(_step(series, last, point, level.value, point.value))
            level = point
        last = point
    return changes


def _measured_steps(series: Series) -> list[Step]:
    return [
        _step(
            series,
            series.points[point.last_before],
            series.points[point.first_after],
            point.before,
            point.after,
            point.drift,
        )
        for point in change_points([point.value for point in series.points])
    ]


def _step(
    series: Series, last: Point, first: Point, before: float, after: float, drift: bool = False
) -> Step:
    is_worse = series.metric.excess(before, after) > 0
    return Step(last, first, before, after, "regression" if is_worse else "improvement", drift)
