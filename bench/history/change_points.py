"""Changes of level in a noisy sequence.

Candidates come from ruptures: the segmentation with the least sum of squares within segments plus a penalty
for each change, found exactly by PELT (Killick, Fearnhead and Eckley 2012). The noise is estimated from
differences of neighbours, in which changes of level hardly show, and outliers are clipped as by a Hampel
filter, so that single ones make no segment. A candidate counts only if its effect is large enough and
Student's t-test between the segments on its sides, corrected for the number of places it was chosen from,
finds it significant. Where exactly it happened is uncertain by as much as noise allows: a confidence set by
likelihood ratio (Hansen 2000).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: relative; a smaller change of a measured level is not reported
MINIMUM_EFFECT = 0.02

#: values of a level at least: two bad nights in a row are none
MINIMUM_LENGTH = 3

#: of a change, in units of the noise's variance, over the logarithm of the number of values
PENALTY = 3.0

#: the probability, under normal noise, with which a candidate may come from a sequence without changes;
#: small, as hundreds of series are searched every night
SIGNIFICANCE = 1e-4

#: the 95% quantile of the likelihood-ratio statistic of a change's place, -2 ln(1 - sqrt(0.95)); Hansen 2000,
#: "Sample splitting and threshold estimation", table I
CONFIDENCE = 7.35

#: noise is at least this, relative; clocks and a quiet machine can make neighbours equal
_LEAST_NOISE = 1e-3

#: values on which a Hampel filter looks, and the deviation in standard deviations beyond which it clips
_WINDOW, _OUTLYING = 5, 3.0

#: standard deviation of normal noise over its median absolute deviation
_NORMAL = 1.4826


@dataclass(frozen=True)
class ChangePoint:
    """A change of level.

    Attributes:
        last_before, first_after: places in the sequence: the change happened between these two, with 95%
            confidence; neighbours if the noise leaves no doubt. Of a drift: its first and last value.
        before, after: the levels, as geometric means.
        drift: the values went from one level to the other little by little.
    """

    last_before: int
    first_after: int
    before: float
    after: float
    drift: bool = False


def change_points(values: Sequence[float]) -> list[ChangePoint]:
    """The changes of level among positive values, in order. Fewer than two times :data:`MINIMUM_LENGTH`
    values have none; nor has a sequence with a value that is not positive."""
    if len(values) < 2 * MINIMUM_LENGTH or min(values) <= 0:
        return []
    logs = np.log(np.asarray(values, dtype=float))  # so that noise and effects are relative
    noise = max(noise_of(logs), _LEAST_NOISE)
    logs = _without_outliers(logs, noise)
    if np.ptp(logs) < math.log1p(MINIMUM_EFFECT):
        return []
    bounds = _confirmed(logs, _candidates(logs / noise))
    return _merged(logs, bounds, noise)


def noise_of(logs: NDArray[Any]) -> float:
    """The standard deviation of independent noise, from the median absolute difference of neighbours."""
    differences = np.diff(logs)
    return float(_NORMAL * np.median(np.abs(differences - np.median(differences))) / math.sqrt(2))


def _without_outliers(logs: NDArray[Any], noise: float) -> NDArray[Any]:
    """Each value clipped to some standard deviations around the median of its neighbourhood, which at the
    ends is moved inwards so that it has as many values as elsewhere."""
    starts = np.clip(np.arange(len(logs)) - _WINDOW // 2, 0, len(logs) - _WINDOW)
    medians = np.median(logs[starts[:, None] + np.arange(_WINDOW)], axis=1)
    return np.clip(logs, medians - _OUTLYING * noise, medians + _OUTLYING * noise)


def _candidates(standardized: NDArray[Any]) -> list[int]:
    """The bounds of segments: 0, the first place of each level but the first, and the number of values."""
    import ruptures

    search = ruptures.KernelCPD(kernel="linear", min_size=MINIMUM_LENGTH).fit(standardized[:, None])
    return [0, *search.predict(pen=PENALTY * math.log(len(standardized)))]


def _confirmed(logs: NDArray[Any], bounds: list[int]) -> list[int]:
    """Without the bounds that are not significant or too small, the least significant one left out first."""
    while len(bounds) > 2:
        pairs = zip(bounds, bounds[1:], bounds[2:], strict=False)
        doubts = [_doubt(logs[start:place], logs[place:end]) for start, place, end in pairs]
        worst = max(range(len(doubts)), key=doubts.__getitem__)
        if doubts[worst] <= SIGNIFICANCE:
            break
        del bounds[worst + 1]
    return bounds


def _doubt(left: NDArray[Any], right: NDArray[Any]) -> float:
    """The probability that noise makes a difference of means so large at the best place of this stretch; 1 of
    an effect that is too small."""
    effect = abs(right.mean() - left.mean())
    if effect < math.log1p(MINIMUM_EFFECT):
        return 1.0
    n = len(left) + len(right)
    variance = (_squares(left) + _squares(right)) / (n - 2)
    error = math.sqrt(variance * (1 / len(left) + 1 / len(right)))
    return min(1.0, n * _tails(effect / max(error, 1e-12), n - 2))


def _tails(statistic: float, degrees: int) -> float:
    """Both tails of Student's distribution."""
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -statistic))


def _merged(logs: NDArray[Any], bounds: list[int], noise: float) -> list[ChangePoint]:
    """A change point for each bound; neighbours around which a line fits clearly better than levels make one
    drift."""
    found: list[ChangePoint] = []
    for start, place, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
        if not _is_drift(logs[start:end], place - start, noise):
            found.append(_step(logs, start, place, end, noise))
        elif found and found[-1].drift and found[-1].first_after == place - 1:
            found[-1] = _drift(logs, found[-1].last_before, end)
        else:
            found.append(_drift(logs, start, end))
    return found


def _is_drift(logs: NDArray[Any], place: int, noise: float) -> bool:
    """Whether a line fits clearly better than a change of level at that place."""
    x = np.arange(len(logs))
    line = np.polyval(np.polyfit(x, logs, 1), x)
    gain = _squares(logs[:place]) + _squares(logs[place:]) - ((logs - line) ** 2).sum()
    return bool(gain > CONFIDENCE * noise**2)


def _drift(logs: NDArray[Any], start: int, end: int) -> ChangePoint:
    slope, offset = np.polyfit(np.arange(start, end), logs[start:end], 1)
    before, after = math.exp(offset + slope * start), math.exp(offset + slope * (end - 1))
    return ChangePoint(start, end - 1, before, after, drift=True)


def _step(logs: NDArray[Any], start: int, place: int, end: int, noise: float) -> ChangePoint:
    within = range(start + 1, end)
    squares = [_squares(logs[start:at]) + _squares(logs[at:end]) for at in within]
    limit = min(squares) + CONFIDENCE * noise**2
    possible = [at for at, found in zip(within, squares, strict=True) if found <= limit]
    before, after = math.exp(logs[start:place].mean()), math.exp(logs[place:end].mean())
    return ChangePoint(min(possible) - 1, max(possible), before, after)


def _squares(logs: NDArray[Any]) -> float:
    return float(len(logs) * logs.var())
