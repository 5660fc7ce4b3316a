"""Intervals of measured times about simulated ones, by what the times rest on and what bounds the step.

Errors are ``log(simulated / measured)``. Rows of one source (one group of people, machines and settings) err
together, so sources count nearly alike, whatever number of rows they have. An interval is the quantile of
absolute errors, a source's n rows sharing a weight of n / (n + 1) (the pooled form of conformal prediction
with random effects, arXiv 1809.07441, where rows differ as much within sources as between them). Intervals by
bound are shrunk toward the class: the class's other rows weigh as :data:`PRIOR_SOURCES` sources. A bound with
fewer than :data:`FEW` sources has at least the width of the class, and one with a single source at least the
quantile of that source's own errors. Times that rest on substitutes of rates have classes of their own
(:data:`EVER_WORSE`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev

#: share of times that lie within their interval
LEVEL = 0.8
#: sources as which the rows of a class count for each of its bounds
PRIOR_SOURCES = 2.0
#: sources with fewer than which a bound's interval is not narrower than that of its class
FEW = 3
#: standard errors from 0 beyond which the mean error of a class is plain, and its intervals are moved by it;
#: two come about too easily among eight sources, as where one of small calls errs far to one side
PLAIN = 3.0
#: classes of rates, each worse than the one before: rates of their own, and the grades of what stands for one
#: (:mod:`measure.simulator.substitutes`)
EVER_WORSE = ("sourced", "extrapolated", "transferred", "substituted")
#: of these, those of what stands for a rate that nobody measured
NO_RATE = EVER_WORSE[2:]
#: the same of rates with a fitted scalar: by steps of the same model and strategy, by those of others
FITTED = ("fitted", "fitted elsewhere")
#: classes of which a price is missing, or all of them: what bounds a step follows from its prices
WITHOUT_PRICES = (EVER_WORSE[-1], "datasheet")
#: in place of a class or of a bound: all of them
ANY = "any"

#: the least part of its price that work without a rate is taken to have needed
SHORTEST = 0.05

#: numbers by the source that they are of
Errors = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Interval:
    """An interval of measured times, for a simulated one.

    Attributes:
        centre, half_width: of log(simulated / measured).
        sources, rows: how many of its own it rests on; where none, it is that of a larger class.
    """

    centre: float
    half_width: float
    sources: int
    rows: int

    @property
    def evidence(self) -> str:
        """What it rests on, as "1 source, 4 rows"."""
        sources = "1 source" if self.sources == 1 else f"{self.sources} sources"
        return f"{sources}, {self.rows} row{'s' if self.rows > 1 else ''}"

    def factors(self, more: float = 0.0) -> tuple[float, float]:
        """What the simulated time is multiplied by for the ends of the interval, which the simulated time
        itself is always in.

        Args:
            more: a further half width, of an error that is independent of the others.
        """
        width = math.hypot(self.half_width, more)
        return min(1.0, math.exp(-self.centre - width)), max(1.0, math.exp(-self.centre + width))


#: intervals by bound, of a class of rates, and of :data:`ANY`
ByBound = dict[str, Interval]


def intervals_by_bound(errors: Mapping[str, Errors]) -> ByBound:
    """The intervals of a class of rates.

    Args:
        errors: by bound and source.
    """
    of_class: dict[str, list[float]] = {}
    for by_source in errors.values():
        for source, some in by_source.items():
            of_class.setdefault(source, []).extend(some)
    centre = _centre([fmean(some) for some in of_class.values()])
    away = _away(of_class, centre)
    intervals = {ANY: _interval(centre, half_width(away), away)}
    for bound, by_source in sorted(errors.items()):
        own = _away(by_source, centre)
        width = half_width(own, away)
        if len(own) < FEW:
            width = max(width, intervals[ANY].half_width)
        if len(own) == 1:
            width = max(width, *(half_width({source: some}) for source, some in own.items()))
        intervals[bound] = _interval(centre, width, own)
    return intervals


def _away(errors: Errors, centre: float) -> Errors:
    return {source: [e - centre for e in some] for source, some in errors.items()}


def _interval(centre: float, width: float, errors: Errors) -> Interval:
    return Interval(centre, width, len(errors), sum(map(len, errors.values())))


def widen(by_rates: dict[str, ByBound]) -> None:
    """Make no interval of a class narrower than that of one whose rates are better: a time that lacks a rate
    is not the surer for it, whatever the few that were measured so erred by. Fewer than :data:`FEW` sources
    do not say how sources differ: their class is no narrower than the next worse one either. Where prices are
    missing (:data:`WITHOUT_PRICES`), every bound has the widest interval of its class."""
    for order in (EVER_WORSE, FITTED):
        names = [name for name in order if name in by_rates]
        for better, worse in pairwise(names):
            _widen_by(by_rates, worse, better)
        for better, worse in reversed([*pairwise(names)]):
            if by_rates[better][ANY].sources < FEW:
                _widen_by(by_rates, better, worse)
    for missing in (by_rates.get(name, {}) for name in WITHOUT_PRICES):
        most = max((each.half_width for each in missing.values()), default=0.0)
        missing.update({bound: replace(each, half_width=most) for bound, each in missing.items()})


def _widen_by(by_rates: dict[str, ByBound], name: str, other: str) -> None:
    """Make no interval of a class narrower than that of another one."""
    for bound, own in by_rates[name].items():
        least = by_rates[other].get(bound, by_rates[other][ANY]).half_width
        by_rates[name][bound] = replace(own, half_width=max(own.half_width, least))


def of_missing_bound(by_rates: Mapping[str, Mapping[str, Interval]], rates: str, bound: str) -> Interval:
    """The interval of a class in which no step with that bound was measured: that of the bound in the next
    worse class, or of the nearest better one, no narrower than any of its own class; without such a class,
    the widest of all."""
    order = next((order for order in (EVER_WORSE, FITTED) if rates in order), ())
    at = order.index(rates) if order else 0
    for other in (*order[at + 1 :], *reversed(order[:at])):
        if bound in by_rates.get(other, {}):
            return max(by_rates[other][bound], widest(by_rates[rates].values()), key=lambda i: i.half_width)
    return widest(each for intervals in by_rates.values() for each in intervals.values())


def widest(intervals: Iterable[Interval]) -> Interval:
    """The one with the largest factor, up or down, in both directions: to which side another kind of time
    errs is not known."""
    most = max(intervals, key=lambda each: abs(each.centre) + each.half_width)
    return replace(most, centre=0.0, half_width=abs(most.centre) + most.half_width)


def of_unknown(parts: Mapping[str, Sequence[tuple[float, float]]], least: float) -> float:
    """The half width of the price of what has no rate, by the errors of steps of which it is a share: of
    log(measured / simulated) of that part alone, if the rest was right.

    Args:
        parts: by source, errors of steps with that share of each; those without a share say nothing.
        least: that of whole steps of the class, which it is no narrower than.
    """
    of_parts = {
        source: [
            math.log(max((math.exp(-error) - 1 + share) / share, SHORTEST)) for error, share in some if share
        ]
        for source, some in parts.items()
    }
    return max(least, half_width({source: some for source, some in of_parts.items() if some}))


def mixed(known: tuple[float, float], share: float, half_width: float) -> tuple[float, float]:
    """The factors of a step of which a share has no rate, and the rest those factors."""
    ends = math.exp(-half_width), math.exp(half_width)
    low, high = ((1 - share) * rest + share * part for rest, part in zip(known, ends, strict=True))
    return low, high


def of_stand_in(errors: Errors) -> Interval:
    """The interval of steps in which one thing stands in for another: up and down the quantile of errors to
    that side, or, of fewer than :data:`FEW` sources, which do not say how sources differ, the largest;
    rounded up to a hundredth, so that it holds them as it is written."""
    sides = [{s: [max(0.0, sign * e) for e in es] for s, es in errors.items()} for sign in (1, -1)]
    ends = [half_width(side) if len(side) >= FEW else max(map(max, side.values())) for side in sides]
    down, up = (math.ceil(100 * end) / 100 for end in ends)
    return Interval((down - up) / 2, (down + up) / 2, len(errors), sum(map(len, errors.values())))


def _centre(means: Sequence[float]) -> float:
    """The mean error of sources where it is plain, else 0."""
    if len(means) < 3:
        return 0.0
    mean = fmean(means)
    return mean if abs(mean) > PLAIN * stdev(means) / math.sqrt(len(means)) else 0.0


def half_width(own: Errors, others: Errors | None = None) -> float:
    """The quantile of absolute errors at the level for as many sources.

    Args:
        others: further errors, all of which together have the weight of :data:`PRIOR_SOURCES`.
    """
    weighted = _weighted(own)
    if others:
        further = _weighted(others)
        share = PRIOR_SOURCES / sum(weight for _, weight in further)
        weighted += [(error, weight * share) for error, weight in further]
    if not weighted:
        return 0.0
    level = LEVEL * sum(weight for _, weight in weighted)
    below = 0.0
    for error, weight in sorted(weighted):
        below += weight
        if below >= level * (1 - 1e-12):
            return error
    return max(weighted)[0]


def _weighted(errors: Errors) -> list[tuple[float, float]]:
    """Absolute errors with their weights: a source of n rows has n / (n + 1), the sooner 1 the more rows say
    what is its own, as where errors differ as much within sources as between them."""
    return [(abs(e), 1 / (len(es) + 1)) for es in errors.values() for e in es]
