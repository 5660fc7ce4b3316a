"""How far simulated step times are from measured ones: an interval for each kind of time.

The error of a row is ``log(simulated / measured)``. Times are put into classes by what they rest on
(``rates``), and within a class by what bounds the step (:mod:`measure.trust.intervals`). What nobody measured
has a wider interval: a class without a row has the widest of all, a bound without one in its class that of
the next worse class, and a strategy without a row adds what strategies err differently.
:func:`coverage` counts how many times lie within the intervals of the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

from pydantic import TypeAdapter

from spbench.bench.measure.trust.intervals import (
    ANY,
    NO_RATE,
    Interval,
    half_width,
    intervals_by_bound,
    mixed,
    of_missing_bound,
    of_stand_in,
    of_unknown,
    widen,
    widest,
)
from spbench.bench.setting_values import STOOD_IN
from spbench.plots.series import grouped

#: pairs of times are counted by the part of the shorter one by which the longer one is more: from each of
#: these up to the next
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, math.inf)
#: the class of the part of a step that has rates, beside another that has none
KNOWN = "extrapolated"


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
        of_unknown: by rates of :data:`NO_RATE`, half width of the price of what has no rate.
        of_orders: by rates, and ANY: of such pairs how many were in the simulated order, by how far they are
            apart.
        of_stand_ins: by class of :data:`STOOD_IN`, that of its steps, which no other interval rests on.
    """

    intervals: Mapping[str, Mapping[str, Interval]]
    strategies: Sequence[str]
    of_strategies: float
    of_ties: Mapping[str, float]
    of_orders: Mapping[str, Sequence[Pairs]]
    of_unknown: Mapping[str, float] = field(default_factory=dict)
    of_stand_ins: Mapping[str, Interval] = field(default_factory=dict)

    @classmethod
    def fit(cls, observations: Sequence[StepObservation]) -> Self:
        """The model of some observations.

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
        #: by source, the errors of a class with the shares of their steps that have no rate
        unknown = {
            name: {s: [(o.log_error, o.unknown) for o in of] for s, of in _by_source(classes[name]).items()}
            for name in NO_RATE
            if name in classes
        }
        return cls(
            intervals={ANY: {ANY: _by_bound(observations)[ANY]}, **by_rates},
            strategies=sorted({part for o in observations for part in o.strategy.split("+")}),
            of_strategies=half_width(_of_strategies(observations)),
            of_ties={name: half_width(by, ties[ANY]) for name, by in ties.items()} if ties[ANY] else {},
            of_orders={name: _by_distance(_pairs(some)) for name, some in classes.items()},
            of_unknown={
                name: of_unknown(parts, max(i.half_width for i in by_rates[name].values()))
                for name, parts in unknown.items()
            },
            of_stand_ins={name: of_stand_in(_errors(some)) for name, some in stood_in.items()},
        )

    def interval(self, rates: str, bound: str) -> tuple[Interval, str]:
        """The interval of a kind of time, and what it rests on in words."""
        of_class = self.intervals.get(rates)
        if of_class is None:
            every = [each for bounds in self.intervals.values() for each in bounds.values()]
            interval, words = widest(every), f"no measured step on {rates} rates, so the widest of all: "
        elif bound not in of_class:
            interval = of_missing_bound(self.intervals, rates, bound)
            words = f"{rates} rates, no measured step bound by {bound or 'that'}, so a wider one: "
        else:
            interval, words = of_class[bound], f"{rates} rates, {bound}: "
        return interval, f"{words}{interval.evidence}"

    def band(
        self, rates: str, bound: str, strategy: str, unknown: float = 0.0, stood_in: Sequence[str] = ()
    ) -> tuple[float, float, str]:
        """The factors of a time's interval, and what it rests on in words; wider for a strategy of which no
        step was measured, and narrower where a small share of the step is ``unknown``.

        Args:
            stood_in: of :data:`STOOD_IN`, beside ``rates``: the interval is no narrower than any of theirs.
        """
        if rates in STOOD_IN:
            rates, stood_in = "sourced", (rates, *stood_in)
        low, high, words = self._band(rates, bound, strategy, unknown)
        for name in reversed(stood_in):
            interval = self.of_stand_ins.get(name)
            said = interval.evidence if interval else "no measured step, so the widest of such"
            factors = (interval or widest([*self.of_stand_ins.values(), Interval(0, 0, 0, 0)])).factors()
            low, high, words = min(low, factors[0]), max(high, factors[1]), f"{name}: {said}; {words}"
        return low, high, words

    def _band(self, rates: str, bound: str, strategy: str, unknown: float) -> tuple[float, float, str]:
        interval, words = self.interval(rates, bound)
        more, none = 0.0, ""
        if not {*strategy.split("+")} <= {*self.strategies}:
            more, none = self.of_strategies, "; none of this strategy"
        factors = interval.factors(more)
        of_known = self.intervals.get(KNOWN, {})
        if unknown and rates in self.of_unknown and of_known:
            known = of_known.get(bound, of_known[ANY]).factors(more)
            low, high = mixed(known, unknown, self.of_unknown[rates])
            if high / low < factors[1] / factors[0]:
                said = f"{unknown:.0%} of the step on {rates} rates, the rest as on {KNOWN} ones"
                return low, high, f"{said}{none}"
        return *factors, f"{words}{none}"

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
        content: dict[str, Any] = json.loads(
            json.dumps(asdict(self)), parse_float=lambda number: float(f"{float(number):.6g}")
        )
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The model that :meth:`as_dict` gave."""
        return TypeAdapter(cls).validate_python(content)


def _by_bound(of_class: Sequence[StepObservation]) -> dict[str, Interval]:
    """The intervals of a class by bound."""
    by_bound = grouped(of_class, lambda o: o.bound)
    return intervals_by_bound({bound: _errors(some) for bound, some in by_bound.items()})


def _by_source(observations: Sequence[StepObservation]) -> dict[str, list[StepObservation]]:
    return grouped(observations, lambda o: o.source)


def _errors(observations: Sequence[StepObservation]) -> dict[str, list[float]]:
    return {source: [o.log_error for o in some] for source, some in _by_source(observations).items()}


def _of_strategies(observations: Sequence[StepObservation]) -> dict[str, list[float]]:
    """By source with several strategies, how far the mean error of each is from the source's."""
    by_source = {}
    for source, some in _by_source(observations).items():
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


# -- what the others cover -----------------------------------------------------------------------------------

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
    """By what is left out, class and source, how many rows lie within the intervals of the others, to which
    they are as new as those of a reader who has another machine; nothing where there are no others."""
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
