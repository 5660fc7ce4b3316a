"""Fits of the intervals of simulated times to measured steps, and their coverage by cross-validation.

Errors are ``log(simulated / measured)``. Rows of one source (one group of people, machines and settings) err
together, so sources count nearly alike, whatever number of rows they have. An interval is the quantile of
absolute errors, a source's n rows sharing a weight of n / (n + 1) (the pooled form of conformal prediction
with random effects, arXiv 1809.07441, where rows differ as much within sources as between them). Intervals by
bound are shrunk toward the class: the class's other rows weigh as :data:`PRIOR_SOURCES` sources. A bound with
fewer than :data:`FEW` sources has at least the width of the class, and one with a single source at least the
quantile of that source's own errors. Times that rest on substitutes of rates have classes of their own
(:attr:`ErrorModel.EVER_WORSE`).

Measured steps are lines of a frame, with these columns:

- source: who measured the step
- rates, bound: the class of rates and the bound, see :class:`Measurement`
- strategy: the strategy of the cell
- log_error: log(simulated / measured)
- alike: equal for rows that are compared with each other; "" for a row that is compared with none
- log_time: log(simulated time of a sample), in any unit that ``alike`` rows share
- machine, kernel: the accelerator, and its attention kernel; "" if there is none
- unknown: the share of the simulated time that has no rate of its own; 0: not told

Errors are a series with the source of each error as its index.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

import numpy as np
from pandas import DataFrame, Series, concat

from spbench.bench.measure import ErrorModel, Interval, Pairs
from spbench.bench.setting_values import STOOD_IN
from spbench.bench.tools.papers.comparison import groups

#: the name for all classes, or for all bounds
ANY = ErrorModel.ANY
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
WITHOUT_PRICES = (ErrorModel.EVER_WORSE[-1], "datasheet")
#: the least share of its price that work without a rate is assumed to have taken
SHORTEST = 0.05
#: intervals by bound, of a class of rates, and of :data:`ANY`
ByBound = dict[str, Interval]
#: the column by whose value steps are left out together
LeftOut = Literal["source", "machine", "kernel"]


def fit(observations: DataFrame) -> ErrorModel:
    """The error model (intervals, ties and orders) of some observations.

    Raises:
        ValueError: ``observations`` is empty, or all of its times rest on substitutes.
    """
    stand_in = observations["rates"].isin(STOOD_IN)
    stood_in, observations = observations[stand_in], observations[~stand_in]
    if observations.empty:
        raise ValueError("no measured step")
    classes = {ANY: observations, **dict(groups(observations, "rates"))}
    by_rates = {name: _by_bound(some) for name, some in classes.items() if name != ANY}
    widen(by_rates)
    every = _pairs(observations)
    pairs = {name: every if name == ANY else every[every["rates"] == name] for name in classes}
    ties = {name: some["simulated"] - some["measured"] for name, some in pairs.items()}
    return ErrorModel(
        intervals={ANY: {ANY: _by_bound(observations)[ANY]}, **by_rates},
        strategies=sorted({*"+".join(observations["strategy"]).split("+")}),
        of_strategies=half_width(_of_strategies(observations)),
        of_ties={name: half_width(of, ties[ANY]) for name, of in ties.items()} if len(ties[ANY]) else {},
        of_orders={name: _by_distance(some) for name, some in pairs.items()},
        of_unknown={
            name: of_unknown(classes[name], max(i.half_width for i in by_rates[name].values()))
            for name in ErrorModel.NO_RATE
            if name in classes
        },
        of_stand_ins={name: of_stand_in(_errors(some)) for name, some in groups(stood_in, "rates")},
    )


def _by_bound(of_class: DataFrame) -> ByBound:
    """The intervals of a class of rates."""
    errors = _errors(of_class)
    means = errors.groupby(level=0, sort=False).agg(fmean)
    # the mean error of sources if it is more than PLAIN standard errors from 0
    centre = fmean(means)
    if len(means) < 3 or abs(centre) <= PLAIN * stdev(means) / math.sqrt(len(means)):
        centre = 0.0
    away = errors - centre
    intervals = {ANY: _interval(centre, half_width(away), away)}
    for bound, some in sorted(groups(of_class, "bound")):
        own = _errors(some) - centre
        width, sources = half_width(own, away), own.index.nunique()
        if sources < FEW:
            width = max(width, intervals[ANY].half_width)
        if sources == 1:
            width = max(width, half_width(own))
        intervals[bound] = _interval(centre, width, own)
    return intervals


def _errors(observations: DataFrame) -> Series[float]:
    return observations.set_index("source")["log_error"]


def _of_strategies(observations: DataFrame) -> Series[float]:
    """Of sources with several strategies: the mean error of each, minus the mean over all of these."""
    means = observations.groupby(["source", "strategy"], sort=False)["log_error"].agg(fmean)
    by_source = means.droplevel("strategy").groupby(level=0, sort=False)
    centred = means.droplevel("strategy") - by_source.transform(fmean)
    return centred[by_source.transform("size") > 1]


def _pairs(observations: DataFrame) -> DataFrame:
    """Each two rows that are alike, by source: logarithms of the ratio of their times, ``simulated`` and
    ``measured``, and the ``rates`` that both have, or ""."""
    alike = observations[observations["alike"] != ""].assign(at=lambda of: range(len(of)))
    both = alike.merge(alike, on=["source", "alike"], suffixes=("", "_of_other"))
    both = both[both["at"] < both["at_of_other"]].set_index("source")
    simulated = both["log_time"] - both["log_time_of_other"]
    errors = both["log_error"] - both["log_error_of_other"]
    rates = both["rates"].where(both["rates"] == both["rates_of_other"], "")
    return DataFrame({"simulated": simulated, "measured": simulated - errors, "rates": rates})


def _by_distance(pairs: DataFrame) -> list[Pairs]:
    """Counts of pairs by the ratio of simulated times, between neighbours in :attr:`ErrorModel.EDGES`."""
    places = [Pairs.distance(math.expm1(abs(simulated))) for simulated in pairs["simulated"]]
    right = pairs["simulated"] * pairs["measured"] > 0
    within = [np.equal(places, at) for at in range(len(ErrorModel.EDGES) - 1)]
    return [Pairs(int(right[at].sum()), int(at.sum()), pairs.index[at].nunique()) for at in within]


def _interval(centre: float, width: float, errors: Series[float]) -> Interval:
    return Interval(centre, width, errors.index.nunique(), len(errors))


def widen(by_rates: dict[str, ByBound]) -> None:
    """Make each class's intervals at least as wide as those of classes with better rates, because a lacking
    rate makes no time surer, however small the few measured errors are. Fewer than :data:`FEW` sources do not
    show how sources differ, so their class is also as wide as the next worse one. Where prices are missing
    (:data:`WITHOUT_PRICES`), every bound has the widest interval of its class."""
    for order in (ErrorModel.EVER_WORSE, ErrorModel.FITTED):
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


def of_unknown(observations: DataFrame, least: float) -> float:
    """The half width of log(measured / simulated) of work without a rate, from the errors of steps with such
    work, if the rest of each step was right; other steps do not count.

    Args:
        least: the half width of whole steps of the class, below which the result never is.
    """
    some = observations[observations["unknown"] != 0].set_index("source")
    taken = (some["log_error"].map(lambda error: math.exp(-error)) - 1 + some["unknown"]) / some["unknown"]
    return max(least, half_width(taken.clip(lower=SHORTEST).map(math.log)))


def of_stand_in(errors: Series[float]) -> Interval:
    """The interval of steps in which one thing stands in for another: to each side the quantile of errors on
    that side or, with fewer than :data:`FEW` sources, which do not show how sources differ, the largest
    error; rounded up to a hundredth, so that the interval holds the errors as it is written."""
    sides = [(sign * errors).clip(lower=0.0) for sign in (1, -1)]
    several = errors.index.nunique() >= FEW
    down, up = (math.ceil(100 * (half_width(side) if several else side.max())) / 100 for side in sides)
    return _interval((down - up) / 2, (down + up) / 2, errors)


def half_width(own: Series[float], others: Series[float] | None = None) -> float:
    """The quantile of absolute errors, at the level that this number of sources has.

    Args:
        others: further errors, all of which together have the weight of :data:`PRIOR_SOURCES`.
    """
    errors, weights = abs(own.to_numpy()), _weights(own)
    if others is not None and len(others):
        further = _weights(others)
        errors = np.concatenate([errors, abs(others.to_numpy())])
        weights = np.concatenate([weights, further * (PRIOR_SOURCES / further.sum())])
    if not len(errors):
        return 0.0
    order = np.argsort(errors, kind="stable")
    level = LEVEL * weights.sum() * (1 - 1e-12)
    return float(errors[order[np.searchsorted(weights[order].cumsum(), level)]])


def _weights(errors: Series[float]) -> np.ndarray:
    """The weight of each error: the n rows of a source together weigh n / (n + 1), as is right if errors
    differ as much within sources as between sources."""
    _, source, rows = np.unique(errors.index, return_inverse=True, return_counts=True)
    return 1 / (rows[source] + 1)


def coverage(observations: DataFrame, what: LeftOut = "source") -> DataFrame:
    """Cross-validation: leave out one source (machine, kernel) at a time, and count, for each of its classes
    and sources, the ``rows``, and those ``within`` the intervals that all others give. A line has ``rates``,
    ``left_out`` (the source, machine or kernel) and ``source`` too; no line if there are no others."""
    columns = ["rates", "left_out", "source"]
    counts = [DataFrame(columns=[*columns, "rows", "within"])]
    for left_out, some in groups(observations, what):
        if not (others := observations[observations[what] != left_out]).empty:
            model = fit(others)
            of_rows = zip(some["rates"], some["bound"], some["strategy"], some["unknown"], strict=True)
            bands = [model.band(*row)[:2] for row in of_rows]
            times = [math.exp(-error) for error in some["log_error"]]
            within = [low <= time <= high for time, (low, high) in zip(times, bands, strict=True)]
            by_class = some.assign(left_out=left_out, within=within).groupby(columns, sort=False)["within"]
            counts.append(by_class.agg(rows="size", within="sum").reset_index())
    return concat(counts, ignore_index=True)


def overall(covered: DataFrame) -> float:
    """The share of rows within their intervals, as a mean in which each source weighs the same."""
    return fmean(covered["within"] / covered["rows"])
