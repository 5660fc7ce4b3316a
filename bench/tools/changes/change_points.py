"""Changes of level in a noisy sequence.

Candidates come from ruptures: the segmentation with the least sum of squares within segments plus a penalty
for each change, found exactly by PELT (Killick, Fearnhead and Eckley 2012). The noise is estimated from
differences of neighbours, because few of these differences span a change of level. A Hampel filter clips
outliers, so that a single outlier makes no segment. A candidate counts only if its effect is large enough and
Student's t-test between the segments on its sides, corrected for the number of places it was chosen from, is
significant. The change's place has a confidence set by likelihood ratio (Hansen 2000), wider with more noise.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # whose parts, a second of imports, are imported as they are first used
from numpy.typing import NDArray

#: the least relative change of a measured level that is reported
MINIMUM_EFFECT = 0.02

#: the fewest values that make a level, so that two bad nights in a row make none
MINIMUM_LENGTH = 3

#: a change costs this times the logarithm of the number of values, in variances of the noise
PENALTY = 3.0

#: the largest probability, under normal noise, that a sequence without changes gives such a candidate; small,
#: because hundreds of series are searched every night
SIGNIFICANCE = 1e-4

#: the 95% quantile of the likelihood-ratio statistic of a change's place, -2 ln(1 - sqrt(0.95)); Hansen 2000,
#: "Sample splitting and threshold estimation", table I
CONFIDENCE = 7.35

#: the least relative noise that is assumed, because on a quiet machine neighbours can be equal
_LEAST_NOISE = 1e-3

#: the Hampel filter's window, in values, and the number of standard deviations beyond which it clips a value
_WINDOW, _OUTLYING = 5, 3.0


@dataclass(frozen=True)
class ChangePoint:
    """A change of level.

    Attributes:
        last_before, first_after: indices of values: the change happened between these two with 95%
            confidence; neighbours if the noise leaves no doubt. For a drift: its first and last value.
        before, after: the levels, as geometric means of values; for a drift, the ends of the fitted line.
        drift: whether the values went from one level to the other little by little.
    """

    last_before: int
    first_after: int
    before: float
    after: float
    drift: bool = False


def change_points(values: Sequence[float]) -> list[ChangePoint]:
    """The changes of level in a sequence, in order; none if it has fewer than two times
    :data:`MINIMUM_LENGTH` values, or a value that is not positive."""
    if len(values) < 2 * MINIMUM_LENGTH or min(values) <= 0:
        return []
    logs = np.log(np.asarray(values, dtype=float))  # so that noise and effects are relative
    # the deviation of differences is that of independent noise times sqrt(2)
    deviation = scipy.stats.median_abs_deviation(np.diff(logs), scale="normal") / math.sqrt(2)
    noise = max(float(deviation), _LEAST_NOISE)
    # no value is an outlier, more than 3 deviations from the median of the 5 values around it (or at an end)
    starts = np.clip(np.arange(len(logs)) - _WINDOW // 2, 0, len(logs) - _WINDOW)
    medians = np.median(logs[starts[:, None] + np.arange(_WINDOW)], axis=1)
    logs = np.clip(logs, medians - _OUTLYING * noise, medians + _OUTLYING * noise)
    if np.ptp(logs) < math.log1p(MINIMUM_EFFECT):
        return []
    bounds = _confirmed(logs, _candidates(logs / noise))
    return _merged(logs, bounds, noise)


def _candidates(standardized: NDArray[Any]) -> list[int]:
    """The bounds of segments as indices: 0, the first index of each later level, and the number of values."""
    import ruptures

    search = ruptures.KernelCPD(kernel="linear", min_size=MINIMUM_LENGTH).fit(standardized[:, None])
    return [0, *search.predict(pen=PENALTY * math.log(len(standardized)))]


def _confirmed(logs: NDArray[Any], bounds: list[int]) -> list[int]:
    """The bounds whose changes are significant and large enough: the least significant bound is left out, and
    the other bounds are judged again, until every change is significant."""
    while len(bounds) > 2:
        pairs = zip(bounds, bounds[1:], bounds[2:], strict=False)
        doubts = [_doubt(logs[start:place], logs[place:end]) for start, place, end in pairs]
        worst = max(range(len(doubts)), key=doubts.__getitem__)
        if doubts[worst] <= SIGNIFICANCE:
            break
        del bounds[worst + 1]
    return bounds


def _doubt(left: NDArray[Any], right: NDArray[Any]) -> float:
    """The probability that noise without a change makes so large a difference between the means of ``left``
    and ``right``, for the best of all places; 1 if the difference is below :data:`MINIMUM_EFFECT`."""
    effect = abs(right.mean() - left.mean())
    if effect < math.log1p(MINIMUM_EFFECT):
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy warns if all values of a side are equal
        p = float(scipy.stats.ttest_ind(left, right).pvalue)
    return min(1.0, (len(left) + len(right)) * p)


def _merged(logs: NDArray[Any], bounds: list[int], noise: float) -> list[ChangePoint]:
    """A change point for each bound. The change is a drift where a line fits clearly better than two levels;
    drifts that follow each other are merged into one."""
    changes: list[ChangePoint] = []
    for start, place, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
        if not _is_drift(logs[start:end], place - start, noise):
            changes.append(_step(logs, start, place, end, noise))
        elif changes and changes[-1].drift and changes[-1].first_after == place - 1:
            changes[-1] = _drift(logs, changes[-1].last_before, end)
        else:
            changes.append(_drift(logs, start, end))
    return changes


def _is_drift(logs: NDArray[Any], place: int, noise: float) -> bool:
    """Whether a line fits clearly better than a change of level at the index ``place``."""
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
    possible = [at for at, total in zip(within, squares, strict=True) if total <= limit]
    before, after = math.exp(logs[start:place].mean()), math.exp(logs[place:end].mean())
    return ChangePoint(min(possible) - 1, max(possible), before, after)


def _squares(logs: NDArray[Any]) -> float:
    return float(len(logs) * logs.var())
