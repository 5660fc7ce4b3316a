"""How far simulated step times are from measured ones: an interval for each kind of time.

The error of a row is ``log(simulated / measured)``. Times are put into classes by what they rest on
(``rates``), and within a class by what bounds the step. What nobody measured has a wider interval: a class
without a row has the widest of all, a bound without one in its class that of the next worse class, and a
strategy without a row adds what strategies err differently. :mod:`tools.papers.error_fits` makes the model of
measured steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from pydantic import TypeAdapter

from spbench.bench.setting_values import STOOD_IN

#: pairs of times are counted by the part of the shorter one by which the longer one is more: from each of
#: these up to the next
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, math.inf)
#: the class of the part of a step that has rates, beside another that has none
KNOWN = "extrapolated"
#: classes of rates, each worse than the one before: rates of their own, and the grades of what stands for one
#: (:mod:`measure.simulator.substitutes`)
EVER_WORSE = ("sourced", "extrapolated", "transferred", "substituted")
#: of these, those of what stands for a rate that nobody measured
NO_RATE = EVER_WORSE[2:]
#: the same of rates with a fitted scalar: by steps of the same model and strategy, by those of others
FITTED = ("fitted", "fitted elsewhere")
#: in place of a class or of a bound: all of them
ANY = "any"


@dataclass(frozen=True)
class Interval:
    """An interval of measured times, for a simulated one.

    Attributes:
        centre, half_width: of log(simulated / measured).
        sources, rows: how many it rests on; 0: the interval is that of a larger class.
    """

    centre: float
    half_width: float
    sources: int
    rows: int

    @property
    def evidence(self) -> str:
        """The sources and rows that the interval rests on, as "1 source, 4 rows"."""
        sources = "1 source" if self.sources == 1 else f"{self.sources} sources"
        return f"{sources}, {self.rows} row{'s' if self.rows > 1 else ''}"

    def factors(self, more: float = 0.0) -> tuple[float, float]:
        """By what the simulated time is multiplied for the two ends of the interval, which always holds the
        simulated time itself.

        Args:
            more: a further half width, of an error that is independent of the others.
        """
        width = math.hypot(self.half_width, more)
        return min(1.0, math.exp(-self.centre - width)), max(1.0, math.exp(-self.centre + width))


@dataclass(frozen=True)
class Pairs:
    """Pairs of layouts of a run that were simulated about as far apart, and measured.

    Attributes:
        right: how many pairs have the same order by simulated and by measured times.
        pairs, sources: how many pairs there are, of how many groups of people.
    """

    right: int
    pairs: int
    sources: int

    @staticmethod
    def distance(apart: float) -> int:
        """The class of two times' ratio minus 1: its place among :data:`EDGES`."""
        return sum(apart >= edge for edge in EDGES[1:])


@dataclass(frozen=True)
class ErrorModel:
    """Intervals by class and bound.

    Attributes:
        intervals: by rates, and by bound; ANY: of all bounds, and of all rates.
        strategies: the strategies of which a step was measured, alone or around each other.
        of_strategies: half width by which errors differ between strategies of a source.
        of_ties: by rates, and ANY: half width by which errors differ of two rows alike but for their layout.
        of_unknown: by rates of :data:`NO_RATE`, half width of the price of work that has no rate.
        of_orders: by rates, and ANY: how many pairs of such rows were in the simulated order, by how far
            their times are apart.
        of_stand_ins: by class of :data:`STOOD_IN`, the interval of its steps, on which no other interval
            rests.
    """

    intervals: Mapping[str, Mapping[str, Interval]]
    strategies: Sequence[str]
    of_strategies: float
    of_ties: Mapping[str, float]
    of_orders: Mapping[str, Sequence[Pairs]]
    of_unknown: Mapping[str, float] = field(default_factory=dict)
    of_stand_ins: Mapping[str, Interval] = field(default_factory=dict)

    def interval(self, rates: str, bound: str) -> tuple[Interval, str]:
        """The interval of times with these rates and this bound, and in words what it rests on."""
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
        """The lowest and highest factor of a time's interval, and in words what they rest on; wider for a
        strategy without a measured step, and narrower if only a small part of the step is ``unknown``.

        Args:
            stood_in: further names of :data:`STOOD_IN`: the interval is at least as wide as each of theirs.
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
        """How often measured pairs of layouts as far apart as ``ratio`` were in the simulated order, as "of
        91 measured pairs 10 to 20% apart, 87% were in the simulated order"; "" if there are none."""
        by_distance = self.of_orders.get(rates, self.of_orders.get(ANY, ()))
        at = Pairs.distance(max(ratio, 1 / ratio) - 1)
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


def of_missing_bound(by_rates: Mapping[str, Mapping[str, Interval]], rates: str, bound: str) -> Interval:
    """The interval of a class in which no step with that bound was measured: the bound's interval in the next
    worse class, or in the nearest better one, at least as wide as each of the class's own; without such a
    class, the widest of all."""
    order = next((order for order in (EVER_WORSE, FITTED) if rates in order), ())
    at = order.index(rates) if order else 0
    for other in (*order[at + 1 :], *reversed(order[:at])):
        if bound in by_rates.get(other, {}):
            return max(by_rates[other][bound], widest(by_rates[rates].values()), key=lambda i: i.half_width)
    return widest(each for intervals in by_rates.values() for each in intervals.values())


def widest(intervals: Iterable[Interval]) -> Interval:
    """The interval with the largest factor, which is used in both directions, because nobody knows to which
    side another kind of time errs."""
    most = max(intervals, key=lambda each: abs(each.centre) + each.half_width)
    return replace(most, centre=0.0, half_width=abs(most.centre) + most.half_width)


def mixed(known: tuple[float, float], share: float, half_width: float) -> tuple[float, float]:
    """The factors of a step with a ``share`` of work without rates; the rest has the factors ``known``."""
    ends = math.exp(-half_width), math.exp(half_width)
    low, high = ((1 - share) * rest + share * part for rest, part in zip(known, ends, strict=True))
    return low, high
