"""Fits of the intervals of simulated times to measured steps, and their coverage by cross-validation.

Errors are ``log(simulated / measured)``. Rows of one source (one group of people, machines and settings) err
together, so sources count nearly alike, whatever number of rows they have. An interval is the quantile of
absolute errors, a source's n rows sharing a weight of n / (n + 1) (the pooled form of conformal prediction
with random effects, arXiv 1809.07441, where rows differ as much within sources as between them). Intervals by
bound are shrunk toward the class: the class's other rows weigh as :data:`PRIOR_SOURCES` sources. A bound with
fewer than :data:`FEW` sources has at least the width of the class, and one with a single source at least the
quantile of that source's own errors. Times that rest on substitutes of rates have classes of their own
(:data:`EVER_WORSE`).
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from spbench.bench.measure import ANY, EDGES, EVER_WORSE, FITTED, NO_RATE, ErrorModel, Interval, Pairs
from spbench.bench.setting_values import STOOD_IN
from spbench.plots.series import grouped

#: share of times that lie within their interval
LEVEL = 0.8
#: how many sources the rows of a class together count as, for the interval of each of its bounds
PRIOR_SOURCES = 2.0
#: a bound with fewer sources has an interval at least as wide as that of its class
FEW = 3
#: how many standard errors from 0 the mean error of a class must be for its intervals to be centred on that
#: mean; two standard errors come about too easily among eight sources
PLAIN = 3.0
#: classes of rates in which some or all prices are missing, so that the bound of a step is unsure
WITHOUT_PRICES = (EVER_WORSE[-1], "datasheet")
#: the least share of its price that work without a rate is assumed to have taken
SHORTEST = 0.05
#: errors by source
Errors = Mapping[str, Sequence[float]]
#: intervals by bound, of a class of rates, and of :data:`ANY`
ByBound = dict[str, Interval]
#: the field by whose value steps are left out together
LeftOut = Literal["source", "machine", "kernel"]


@dataclass(frozen=True)
class StepObservation:
    """A measured step, and the error of its simulated time.

    Attributes:
        source: who measured the step.
        rates, bound: the class of rates and the bound, see :class:`Measurement`.
        strategy: the strategy of the cell.
        log_error: log(simulated / measured).
        alike: equal for rows that are compared with each other; "" for a row that is compared with none.
        log_time: log(simulated time of a sample), in any unit that ``alike`` rows share.
        machine, kernel: the accelerator, and its attention kernel; "" if there is none.
        unknown: the share of the simulated time that has no rate of its own; 0: not told.
    """

    source: str
    rates: str
    bound: str
    strategy: str
    log_error: float
    alike: str = ""
    log_time: float = 0.0
    machine: str = ""
    kernel: str = ""
    unknown: float = 0.0


def fit(observations: Sequence[StepObservation]) -> ErrorModel:
    """The error model (intervals, ties and orders) of some observations.

    Raises:
        ValueError: ``observations`` is empty.
    """
    stood_in = grouped((o for o in observations if o.rates in STOOD_IN), lambda o: o.rates)
    if not (observations := [o for o in observations if o.rates not in STOOD_IN]):
        raise ValueError("no measured step")
    classes = {ANY: list(observations), **grouped(observations, lambda o: o.rates)}
    by_rates = {name: _by_bound(some) for name, some in classes.items() if name != ANY}
    widen(by_rates)
    ties = {name: _differences(some) for name, some in classes.items()}
    return ErrorModel(
        intervals={ANY: {ANY: _by_bound(observations)[ANY]}, **by_rates},
        strategies=sorted({part for o in observations for part in o.strategy.split("+")}),
        of_strategies=half_width(_of_strategies(observations)),
        of_ties={name: half_width(by, ties[ANY]) for name, by in ties.items()} if ties[ANY] else {},
        of_orders={name: _by_distance(_pairs(some)) for name, some in classes.items()},
        of_unknown={
            name: of_unknown(classes[name], max(i.half_width for i in by_rates[name].values()))
            for name in NO_RATE
            if name in classes
        },
        of_stand_ins={name: of_stand_in(_errors(some)) for name, some in stood_in.items()},
    )


def _by_bound(of_class: Sequence[StepObservation]) -> ByBound:
    """The intervals of a class of rates."""
    errors = _errors(of_class)
    centre = _centre([fmean(some) for some in errors.values()])
    away = _away(errors, centre)
    intervals = {ANY: _interval(centre, half_width(away), away)}
    for bound, some in sorted(grouped(of_class, lambda o: o.bound).items()):
        own = _away(_errors(some), centre)
        width = half_width(own, away)
        if len(own) < FEW:
            width = max(width, intervals[ANY].half_width)
        if len(own) == 1:
            width = max(width, half_width(own))
        intervals[bound] = _interval(centre, width, own)
    return intervals


def _by_source(observations: Sequence[StepObservation]) -> dict[str, list[StepObservation]]:
    return grouped(observations, lambda o: o.source)


def _errors(observations: Sequence[StepObservation]) -> dict[str, list[float]]:
    return {source: [o.log_error for o in some] for source, some in _by_source(observations).items()}


def _of_strategies(observations: Sequence[StepObservation]) -> dict[str, list[float]]:
    """By source with several strategies: the mean error of each, minus the mean over all of these."""
    by_source = {}
    for source, some in _by_source(observations).items():
        means = [fmean(o.log_error for o in of) for of in grouped(some, lambda o: o.strategy).values()]
        if len(means) > 1:
            by_source[source] = [mean - fmean(means) for mean in means]
    return by_source


class ComparedTimes(NamedTuple):
    """Two layouts of a run: logarithms of the ratio of their times, simulated and measured."""

    source: str
    simulated: float
    measured: float


def _pairs(observations: Sequence[StepObservation]) -> Iterator[ComparedTimes]:
    """The pairs of rows that are alike, with the ratios of their times."""
    alike = grouped((o for o in observations if o.alike), lambda o: (o.source, o.alike))
    for (source, _), some in alike.items():
        for a, b in combinations(some, 2):
            simulated = a.log_time - b.log_time
            yield ComparedTimes(source, simulated, simulated - (a.log_error - b.log_error))


def _differences(observations: Sequence[StepObservation]) -> dict[str, list[float]]:
    """By source, the differences of the log errors of rows that are alike."""
    pairs = grouped(_pairs(observations), lambda pair: pair.source)
    return {source: [each.simulated - each.measured for each in some] for source, some in pairs.items()}


def _by_distance(compared: Iterable[ComparedTimes]) -> list[Pairs]:
    """Counts of pairs by the ratio of their simulated times, between neighbours in :data:`EDGES`."""
    classes = grouped(compared, lambda each: Pairs.distance(math.expm1(abs(each.simulated))))
    return [
        Pairs(sum(c.simulated * c.measured > 0 for c in some), len(some), len({c.source for c in some}))
        for some in (classes.get(at, []) for at, _ in enumerate(pairwise(EDGES)))
    ]


def _away(errors: Errors, centre: float) -> Errors:
    return {source: [e - centre for e in some] for source, some in errors.items()}


def _interval(centre: float, width: float, errors: Errors) -> Interval:
    return Interval(centre, width, len(errors), sum(map(len, errors.values())))


def widen(by_rates: dict[str, ByBound]) -> None:
    """Make each class's intervals at least as wide as those of classes with better rates, because a lacking
    rate makes no time surer, however small the few measured errors are. Fewer than :data:`FEW` sources do not
    show how sources differ, so their class is also as wide as the next worse one. Where prices are missing
    (:data:`WITHOUT_PRICES`), every bound has the widest interval of its class."""
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
    """Make each interval of class ``name`` at least as wide as class ``other``'s of the same bound."""
    for bound, own in by_rates[name].items():
        least = by_rates[other].get(bound, by_rates[other][ANY]).half_width
        by_rates[name][bound] = replace(own, half_width=max(own.half_width, least))


def of_unknown(observations: Sequence[StepObservation], least: float) -> float:
    """The half width of log(measured / simulated) of work without a rate, from the errors of steps with such
    work, if the rest of each step was right; other steps do not count.

    Args:
        least: the half width of whole steps of the class, below which the result never is.
    """
    of_parts = {
        source: [math.log(max((math.exp(-o.log_error) - 1 + o.unknown) / o.unknown, SHORTEST)) for o in some]
        for source, some in _by_source([o for o in observations if o.unknown]).items()
    }
    return max(least, half_width(of_parts))


def of_stand_in(errors: Errors) -> Interval:
    """The interval of steps in which one thing stands in for another: to each side the quantile of errors on
    that side or, with fewer than :data:`FEW` sources, which do not show how sources differ, the largest
    error; rounded up to a hundredth, so that the interval holds the errors as it is written."""
    sides = [{s: [max(0.0, sign * e) for e in es] for s, es in errors.items()} for sign in (1, -1)]
    ends = [half_width(side) if len(side) >= FEW else max(map(max, side.values())) for side in sides]
    down, up = (math.ceil(100 * end) / 100 for end in ends)
    return Interval((down - up) / 2, (down + up) / 2, len(errors), sum(map(len, errors.values())))


def _centre(means: Sequence[float]) -> float:
    """The mean error of sources if it is more than :data:`PLAIN` standard errors from 0, else 0."""
    if len(means) < 3:
        return 0.0
    mean = fmean(means)
    return mean if abs(mean) > PLAIN * stdev(means) / math.sqrt(len(means)) else 0.0


def half_width(own: Errors, others: Errors | None = None) -> float:
    """The quantile of absolute errors, at the level that this number of sources has.

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
    errors, weights = zip(*sorted(weighted), strict=True)
    level = LEVEL * sum(weights) * (1 - 1e-12)
    return float(errors[bisect_left([*accumulate(weights)], level)])


def _weighted(errors: Errors) -> list[tuple[float, float]]:
    """(absolute error, weight) of each row: the n rows of a source together weigh n / (n + 1), as is right if
    errors differ as much within sources as between sources."""
    return [(abs(e), 1 / (len(es) + 1)) for es in errors.values() for e in es]


class Covered(NamedTuple):
    """How many rows of one class and source lie within the intervals fitted to the rows not left out.

    Attributes:
        left_out: the source, machine or kernel whose rows were left out when intervals were fitted.
    """

    rates: str
    left_out: str
    source: str
    rows: int
    within: int


def coverage(observations: Sequence[StepObservation], what: LeftOut = "source") -> list[Covered]:
    """Cross-validation: leave out one source (machine, kernel) at a time, and count, for each of its classes
    and sources, the rows within the intervals that all others give; empty if there are no others."""
    counts = []
    for left_out, some in grouped(observations, lambda o: getattr(o, what)).items():
        if not (others := [o for o in observations if getattr(o, what) != left_out]):
            continue
        model = fit(others)
        for (rates, source), rows in grouped(some, lambda o: (o.rates, o.source)).items():
            bands = ((o, model.band(o.rates, o.bound, o.strategy, o.unknown)) for o in rows)
            within = sum(low <= math.exp(-o.log_error) <= high for o, (low, high, _) in bands)
            counts.append(Covered(rates, left_out, source, len(rows), within))
    return counts


def overall(covered: Sequence[Covered]) -> float:
    """The share of rows within their intervals, as a mean in which each source weighs the same."""
    return fmean(each.within / each.rows for each in covered)
