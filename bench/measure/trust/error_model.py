"""How far simulated step times are from measured ones: an interval for each kind of time.

The error of a row is ``log(simulated / measured)``. Rows of one source (one group of people, machines and
settings) err together, so sources count nearly alike, whatever number of rows they have. Times are put into
classes by what they rest on (``rates``), and within a class by what bounds the step. An interval is the
quantile of absolute errors, a source's n rows sharing a weight of n / (n + 1) (the pooled form of conformal
prediction with random effects, arXiv 1809.07441, where rows differ as much within sources as between them).
Intervals by bound are shrunk toward the class: the class's other rows weigh as :data:`PRIOR_SOURCES` sources,
and a bound with fewer than :data:`FEW` sources has at least the width of the class. Times that rest on
substitutes of rates have classes of their own (:data:`EVER_WORSE`).
What nobody measured has the widest interval: a class without a row, or a bound without one in its class; and
a class of a single source is no narrower than the next worse one. :mod:`measure.trust.coverage` counts how
many times lie within the intervals of the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter

from spbench.plots.series import grouped

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
#: the same of rates with a fitted scalar: by steps of the same model and strategy, by those of others
FITTED = ("fitted", "fitted elsewhere")
#: in place of a class or of a bound: all of them
ANY = "any"

#: pairs of times are counted by the part of the shorter one by which the longer one is more: from each of
#: these up to the next
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, math.inf)


@dataclass(frozen=True)
class StepObservation:
    """A measured step, and how far its simulated time is from it.

    Attributes:
        source: who measured.
        rates, bound: as of :class:`Measurement`.
        strategy: as of a cell.
        log_error: log(simulated / measured).
        alike: the same of rows that are compared with each other; "" of one that stands alone.
        log_time: log(simulated time of a sample), in any unit that rows that are alike share.
        machine, kernel: the accelerator, and the kernel of its attention; "" where it has none.
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

    def factors(self, more: float = 0.0) -> tuple[float, float]:
        """What the simulated time is multiplied by for the ends of the interval, which the simulated time
        itself is always in.

        Args:
            more: a further half width, of an error that is independent of the others.
        """
        width = math.hypot(self.half_width, more)
        return min(1.0, math.exp(-self.centre - width)), max(1.0, math.exp(-self.centre + width))


class ComparedTimes(NamedTuple):
    """Two layouts of a run: logarithms of the one's time over the other's."""

    source: str
    simulated: float
    measured: float


@dataclass(frozen=True)
class Pairs:
    """Pairs of layouts of a run that were simulated about as far apart, and measured.

    Attributes:
        right: those of which the one whose simulated time is shorter was measured to be the shorter.
        pairs, sources: how many, of how many groups of people.
    """

    right: int
    pairs: int
    sources: int


@dataclass(frozen=True)
class ErrorModel:
    """Intervals by class and bound.

    Attributes:
        intervals: by rates, and by bound; ANY: of all bounds, and of all rates.
        strategies: those of which a step was measured, alone or around each other.
        of_strategies: half width of what strategies of a source err differently.
        of_ties: by rates, and ANY: half width of the difference of the errors of two rows that are alike but
            for their layout.
        of_orders: by rates, and ANY: of such pairs how many were in the simulated order, by how far they are
            apart.
    """

    intervals: Mapping[str, Mapping[str, Interval]]
    strategies: Sequence[str]
    of_strategies: float
    of_ties: Mapping[str, float]
    of_orders: Mapping[str, Sequence[Pairs]]

    @classmethod
    def fit(cls, observations: Sequence[StepObservation]) -> Self:
        """The model of some observations.

        Raises:
            ValueError: ``observations`` is empty.
        """
        if not observations:
            raise ValueError("no measured step")
        classes = {ANY: list(observations), **grouped(observations, lambda o: o.rates)}
        by_rates = {name: _intervals(some) for name, some in classes.items() if name != ANY}
        _widen(by_rates)
        ties = {name: _differences(some) for name, some in classes.items()}
        return cls(
            intervals={ANY: {ANY: _intervals(observations)[ANY]}, **by_rates},
            strategies=sorted({part for o in observations for part in o.strategy.split("+")}),
            of_strategies=_half_width(_of_strategies(observations)),
            of_ties={name: _half_width(by, ties[ANY]) for name, by in ties.items()} if ties[ANY] else {},
            of_orders={name: _by_distance(_pairs(some)) for name, some in classes.items()},
        )

    def interval(self, rates: str, bound: str) -> tuple[Interval, str]:
        """The interval of a kind of time, and what it rests on in words."""
        of_class = self.intervals.get(rates)
        if of_class is None:
            every = [each for bounds in self.intervals.values() for each in bounds.values()]
            interval, words = _widest(every), f"no measured step on {rates} rates, so the widest of all: "
        elif bound not in of_class:
            missing = f"no measured step bound by {bound or 'that'}"
            interval, words = _widest(of_class.values()), f"{rates} rates, {missing}, so the widest: "
        else:
            interval, words = of_class[bound], f"{rates} rates, {bound}: "
        sources = "1 source" if interval.sources == 1 else f"{interval.sources} sources"
        return interval, f"{words}{sources}, {interval.rows} row{'s' if interval.rows > 1 else ''}"

    def band(self, rates: str, bound: str, strategy: str) -> tuple[float, float, str]:
        """The factors of a time's interval, and what it rests on in words; wider for a strategy of which no
        step was measured."""
        interval, words = self.interval(rates, bound)
        if {*strategy.split("+")} <= {*self.strategies}:
            return *interval.factors(), words
        return *interval.factors(self.of_strategies), f"{words}; none of this strategy"

    def tie(self, rates: str) -> float:
        """The ratio up to which the times of two layouts of the same run are a tie."""
        return math.exp(self.of_ties.get(rates, self.of_ties.get(ANY, 0.0)))

    def order(self, rates: str, ratio: float) -> str:
        """What was measured of pairs of layouts as far apart as two times of this ratio, as "of 91 measured
        pairs 10 to 20% apart, 87% were in the simulated order"; "" if there are none."""
        by_distance = self.of_orders.get(rates, self.of_orders.get(ANY, ()))
        at = _distance(max(ratio, 1 / ratio) - 1)
        if not by_distance or not by_distance[at].pairs:
            return ""
        (least, most), pairs = EDGES[at : at + 2], by_distance[at]
        apart = f"{least:.0%} and more" if math.isinf(most) else f"{100 * least:.0f} to {most:.0%}"
        share = f"{pairs.right / pairs.pairs:.0%} were in the simulated order"
        return f"of {pairs.pairs} measured pairs {apart} apart, {share}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, of six digits."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_float=_six_digits)
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The model that :meth:`as_dict` gave."""
        return TypeAdapter(cls).validate_python(content)


def _six_digits(number: str) -> float:
    return float(f"{float(number):.6g}")


#: numbers by the source that they are of
_Errors = Mapping[str, Sequence[float]]


def _intervals(of_class: Sequence[StepObservation]) -> dict[str, Interval]:
    """The intervals of a class by bound."""
    errors = _by_source(of_class)
    centre = _centre([fmean(some) for some in errors.values()])
    away = {source: [e - centre for e in some] for source, some in errors.items()}
    intervals = {ANY: Interval(centre, _half_width(away), len(errors), len(of_class))}
    for bound, some in sorted(grouped(of_class, lambda o: o.bound).items()):
        own = {source: [e - centre for e in es] for source, es in _by_source(some).items()}
        width = _half_width(own, away)
        if len(own) < FEW:
            width = max(width, intervals[ANY].half_width)
        intervals[bound] = Interval(centre, width, len(own), len(some))
    return intervals


def _widen(by_rates: dict[str, dict[str, Interval]]) -> None:
    """Make no interval of a class narrower than that of one whose rates are better: a time that lacks a rate
    is not the surer for it, whatever the few that were measured so erred by. A single source does not say how
    sources differ: its class is no narrower than the next worse one either. What bounds a step follows from
    its prices: where one is missing, every bound has the widest interval of its class."""
    for order in (EVER_WORSE, FITTED):
        names = [name for name in order if name in by_rates]
        for better, worse in pairwise(names):
            _widen_by(by_rates, worse, better)
        for better, worse in reversed([*pairwise(names)]):
            if by_rates[better][ANY].sources == 1:
                _widen_by(by_rates, better, worse)
    missing = by_rates.get(EVER_WORSE[-1], {})
    widest = max((each.half_width for each in missing.values()), default=0.0)
    missing.update({bound: replace(each, half_width=widest) for bound, each in missing.items()})


def _widen_by(by_rates: dict[str, dict[str, Interval]], name: str, other: str) -> None:
    """Make no interval of a class narrower than that of another one."""
    for bound, own in by_rates[name].items():
        least = by_rates[other].get(bound, by_rates[other][ANY]).half_width
        by_rates[name][bound] = replace(own, half_width=max(own.half_width, least))


def _widest(intervals: Iterable[Interval]) -> Interval:
    """The one with the largest factor, up or down."""
    return max(intervals, key=lambda each: abs(each.centre) + each.half_width)


def _by_source(observations: Iterable[StepObservation]) -> dict[str, list[float]]:
    groups = grouped(observations, lambda o: o.source)
    return {source: [o.log_error for o in some] for source, some in groups.items()}


def _centre(means: Sequence[float]) -> float:
    """The mean error of sources where it is plain, else 0."""
    if len(means) < 3:
        return 0.0
    mean = fmean(means)
    return mean if abs(mean) > PLAIN * stdev(means) / math.sqrt(len(means)) else 0.0


def _half_width(own: _Errors, others: _Errors | None = None) -> float:
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


def _weighted(errors: _Errors) -> list[tuple[float, float]]:
    """Absolute errors with their weights: a source of n rows has n / (n + 1), the sooner 1 the more rows say
    what is its own, as where errors differ as much within sources as between them."""
    return [(abs(e), 1 / (len(es) + 1)) for es in errors.values() for e in es]


def _of_strategies(observations: Sequence[StepObservation]) -> dict[str, list[float]]:
    """By source with several strategies, how far the mean error of each is from the source's."""
    by_source = {}
    for source, some in grouped(observations, lambda o: o.source).items():
        means = [fmean(o.log_error for o in of) for of in grouped(some, lambda o: o.strategy).values()]
        if len(means) > 1:
            by_source[source] = [mean - fmean(means) for mean in means]
    return by_source


def _pairs(observations: Sequence[StepObservation]) -> Iterator[ComparedTimes]:
    """The pairs of rows that are alike; of the same simulated time none says an order."""
    alike = grouped((o for o in observations if o.alike), lambda o: (o.source, o.alike))
    for (source, _), some in alike.items():
        for a, b in combinations(some, 2):
            simulated = a.log_time - b.log_time
            yield ComparedTimes(source, simulated, simulated - (a.log_error - b.log_error))


def _differences(observations: Sequence[StepObservation]) -> dict[str, list[float]]:
    """By source, the differences of the errors of rows that are alike."""
    pairs = grouped(_pairs(observations), lambda pair: pair.source)
    return {source: [each.simulated - each.measured for each in some] for source, some in pairs.items()}


def _distance(apart: float) -> int:
    """The class of a ratio - 1 of two times, by its place among :data:`EDGES`."""
    return sum(apart >= edge for edge in EDGES[1:])


def _by_distance(compared: Iterable[ComparedTimes]) -> list[Pairs]:
    """The pairs by how far their simulated times are apart, one for each two of :data:`EDGES`."""
    classes: list[list[ComparedTimes]] = [[] for _ in pairwise(EDGES)]
    for each in compared:
        classes[_distance(math.expm1(abs(each.simulated)))].append(each)
    return [
        Pairs(sum(c.simulated * c.measured > 0 for c in some), len(some), len({c.source for c in some}))
        for some in classes
    ]
