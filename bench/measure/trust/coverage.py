"""How many measured steps lie within the intervals that other ones give: those of other sources, of other
machines, or of other attention kernels. Each is left out in turn, so that its steps are as new to the
intervals as those of a reader who has another machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from spbench.bench.measure.trust.error_model import ErrorModel, StepObservation
from spbench.plots.series import grouped

#: what steps have in common that are left out together
LeftOut = Literal["source", "machine", "kernel"]


class Covered(NamedTuple):
    """How many rows of a class, of one source, lie within the intervals of the rest.

    Attributes:
        left_out: the source, machine or kernel whose rows the intervals do not know.
    """

    rates: str
    left_out: str
    source: str
    rows: int
    within: int


def coverage(observations: Sequence[StepObservation], what: LeftOut = "source") -> list[Covered]:
    """By what is left out, class and source, how many rows lie within the intervals of the others; nothing
    where there are no others."""
    counts = []
    for left_out, some in grouped(observations, lambda o: getattr(o, what)).items():
        if not (others := [o for o in observations if getattr(o, what) != left_out]):
            continue
        model = ErrorModel.fit(others)
        for (rates, source), rows in grouped(some, lambda o: (o.rates, o.source)).items():
            within = sum(_within(model, o) for o in rows)
            counts.append(Covered(rates, left_out, source, len(rows), within))
    return counts


def overall(covered: Sequence[Covered]) -> float:
    """The share of rows within their intervals, sources counting alike."""
    return fmean(each.within / each.rows for each in covered)


def _within(model: ErrorModel, o: StepObservation) -> bool:
    low, high, _ = model.band(o.rates, o.bound, o.strategy, o.unknown)
    return low <= math.exp(-o.log_error) <= high
