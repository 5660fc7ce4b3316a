"""How far simulated step times are from measured ones: an interval for each kind of time.

The error of a row is ``log(simulated / measured)``. Times have a class by the rates that they rest on
(``rates``), and within a class a bound, which is what limits the step. Unmeasured kinds have wider intervals:
a class without a row has the widest of all, a bound without a row has that of the next worse class, and a
strategy without a row adds the difference between strategies' errors. :mod:`tools.papers.error_fits` makes
the model from measured steps.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from pydantic import TypeAdapter

from spbench.bench.setting_values import STOOD_IN

#: the class of the part of a step that has rates, where another part has none
KNOWN = "extrapolated"


@dataclass(frozen=True)
class Interval:
    """The interval in which the measured time of a simulated step is expected.

    Attributes:
        centre, half_width: the middle and half the width of the interval of log(simulated / measured).
        sources, rows: how many sources and rows it rests on; 0: the interval is a larger class's.
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
        """The factors by which the simulated time is multiplied for the low and the high end of the interval,
        which always contains the simulated time.

        Args:
            more: a further half width, of an error that is independent of the others.
        """
        width = math.hypot(self.half_width, more)
        return min(1.0, math.exp(-self.centre - width)), max(1.0, math.exp(-self.centre + width))


@dataclass(frozen=True)
class Pairs:
    """Measured pairs of layouts of a run whose simulated times were about equally far apart.

    Attributes:
        right: how many pairs have the same order by simulated and by measured times.
        pairs, sources: how many pairs, and how many groups of people measured them.
    """

    right: int
    pairs: int
    sources: int

    @staticmethod
    def distance(apart: float) -> int:
        """The index in :data:`EDGES` of a pair whose longer time is 1 + ``apart`` times the shorter."""
        return sum(apart >= edge for edge in ErrorModel.EDGES[1:])


@dataclass(frozen=True)
class ErrorModel:
    """The intervals of step times by class of rates and bound, and how errors differ within them.

    Attributes:
        intervals: the intervals by rates, then by bound; ANY is all rates, or all bounds.
        strategies: the strategies with a measured step, alone or nested.
        of_strategies: the half width of differences of errors between strategies of a source.
        of_ties: the half width of differences of errors between layouts of a run, by rates or ANY.
        of_unknown: the half width of the price of work without a rate, by the classes of :data:`NO_RATE`.
        of_orders: pairs of such rows in the simulated order, by rates or ANY, then as in :data:`EDGES`.
        of_stand_ins: the interval by the classes of :data:`STOOD_IN`, whose steps count in no other.
    """

    #: the file of the model that comes with the package
    FILE = "bands.json"
    #: the limits between classes of pairs of times, by longer / shorter - 1
    EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, math.inf)
    #: classes of rates, each worse than the one before: measured rates, then the grades of substitutes
    #: (:mod:`measure.simulator.substitutes`)
    EVER_WORSE = ("sourced", "extrapolated", "transferred", "substituted")
    #: the classes of :data:`EVER_WORSE` in which a rate is missing
    NO_RATE = EVER_WORSE[2:]
    #: the classes of rates with a scalar fitted to steps of the same model and strategy, or of others
    FITTED = ("fitted", "fitted elsewhere")
    #: the name for all classes, or for all bounds
    ANY = "any"

    intervals: Mapping[str, Mapping[str, Interval]]
    strategies: Sequence[str]
    of_strategies: float
    of_ties: Mapping[str, float]
    of_orders: Mapping[str, Sequence[Pairs]]
    of_unknown: Mapping[str, float] = field(default_factory=dict)
    of_stand_ins: Mapping[str, Interval] = field(default_factory=dict)

    def interval(self, rates: str, bound: str) -> tuple[Interval, str]:
        """The interval of times with these rates and this bound, and in words the measurements behind it."""
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
        """The lowest and highest factor of a time's interval, and in words what they rest on. It is wider for
        a strategy without a measured step, narrower if only a small part is ``unknown``.

        Args:
            stood_in: further names of :data:`STOOD_IN`; the interval contains the interval of each.
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
            known = of_known.get(bound, of_known[ErrorModel.ANY]).factors(more)
            low, high = mixed(known, unknown, self.of_unknown[rates])
            if high / low < factors[1] / factors[0]:
                said = f"{unknown:.0%} of the step on {rates} rates, the rest as on {KNOWN} ones"
                return low, high, f"{said}{none}"
        return *factors, f"{words}{none}"

    def tie(self, rates: str) -> float:
        """The ratio of the longer to the shorter time up to which two layouts of the same run are a tie."""
        return math.exp(self.of_ties.get(rates, self.of_ties.get(ErrorModel.ANY, 0.0)))

    def order(self, rates: str, ratio: float) -> str:
        """How often measured pairs of layouts as far apart as ``ratio`` were in the simulated order, as "of
        91 measured pairs 10 to 20% apart, 87% were in the simulated order"; "" if there are no such pairs."""
        by_distance = self.of_orders.get(rates, self.of_orders.get(ErrorModel.ANY, ()))
        at = Pairs.distance(max(ratio, 1 / ratio) - 1)
        if not by_distance or not by_distance[at].pairs:
            return ""
        (least, most), pairs = ErrorModel.EDGES[at : at + 2], by_distance[at]
        apart = f"{least:.0%} and more" if math.isinf(most) else f"{100 * least:.0f} to {most:.0%}"
        share = f"{pairs.right / pairs.pairs:.0%} were in the simulated order"
        return f"of {pairs.pairs} measured pairs {apart} apart, {share}"

    def as_dict(self) -> dict[str, Any]:
        """The model as plain data, its numbers rounded to six digits."""
        content: dict[str, Any] = json.loads(
            json.dumps(asdict(self)), parse_float=lambda number: float(f"{float(number):.6g}")
        )
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The model from the data that :meth:`as_dict` returned."""
        return TypeAdapter(cls).validate_python(content)


def of_missing_bound(by_rates: Mapping[str, Mapping[str, Interval]], rates: str, bound: str) -> Interval:
    """The interval of a bound that was not measured in its class: the bound's interval in the next worse
    class, or in the nearest better one, at least as wide as each interval of the class; if no class has the
    bound, the widest of all."""
    order = next((order for order in (ErrorModel.EVER_WORSE, ErrorModel.FITTED) if rates in order), ())
    at = order.index(rates) if order else 0
    for other in (*order[at + 1 :], *reversed(order[:at])):
        if bound in by_rates.get(other, {}):
            return max(by_rates[other][bound], widest(by_rates[rates].values()), key=lambda i: i.half_width)
    return widest(each for intervals in by_rates.values() for each in intervals.values())


def widest(intervals: Iterable[Interval]) -> Interval:
    """The interval with the largest error, made symmetric about 0, because nobody knows in which direction
    another kind of time errs."""
    most = max(intervals, key=lambda each: abs(each.centre) + each.half_width)
    return replace(most, centre=0.0, half_width=abs(most.centre) + most.half_width)


def mixed(known: tuple[float, float], share: float, half_width: float) -> tuple[float, float]:
    """The low and high factors of a step; a ``share`` has no rates, the rest has the factors ``known``."""
    ends = math.exp(-half_width), math.exp(half_width)
    low, high = ((1 - share) * rest + share * part for rest, part in zip(known, ends, strict=True))
    return low, high
