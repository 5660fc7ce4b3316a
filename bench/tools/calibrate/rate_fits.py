"""Rates of a cluster, fitted by least squares to the times in logs: forms of one or two coefficients."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy  # whose parts, a second of imports, are imported as they are first used

from spbench.bench.tools.calibrate.log_findings import AttentionSpeed, Findings, TimedCollective, TimedPass
from spbench.impls import WIRE_SHARE
from spbench.plots.series import grouped


class LeastSquares(NamedTuple):
    """The fit of values by a sum of columns, each times its coefficient.

    Attributes:
        coefficients: a coefficient for each column, in the order of the columns.
        mean_error, largest_error: the mean and the maximum of |fitted / value - 1|.
    """

    coefficients: tuple[float, ...]
    mean_error: float
    largest_error: float


def least_squares(values: Sequence[float], *columns: Sequence[float]) -> LeastSquares:
    """The fit, with coefficients of at least 0, whose squared relative errors have the least sum. Errors are
    relative so that the times of small and of large messages count alike."""
    matrix = np.column_stack(columns) / np.asarray(values, float)[:, None]
    scale = np.linalg.norm(matrix, axis=0)  # columns of ones, bytes and FLOPs differ by orders of magnitude
    coefficients = scipy.optimize.nnls(matrix / scale, np.ones(len(values)))[0] / scale
    errors = np.abs(matrix @ coefficients - 1)
    return LeastSquares(tuple(map(float, coefficients)), float(errors.mean()), float(errors.max()))


#: the fewest sizes to which a curve is fitted
_FEWEST = 3
#: the least bytes of a pass over memory whose time the caches do not shorten
LARGE_PASS_BYTES = 2**27
#: the fewest gaps between kernels of which a median is taken
_FEWEST_GAPS = 10

T = TypeVar("T")


@dataclass(frozen=True)
class Rate:
    """A rate by size, as a cluster's file has it.

    Attributes:
        best: the measured FLOPs or bytes per second of the fastest size, or of the largest.
        limit: the FLOPs or bytes per second that the form approaches at large sizes.
        other: the form's second figure: a latency in seconds, a half length in tokens, or a bandwidth of
            operands in bytes per second; None if there are too few points for a curve.
        how: words on the form, the number of points, and the errors of the fit.
        source: the names of the logs.
    """

    best: float
    limit: float
    other: float | None
    how: str
    source: str


def _by(
    findings: Mapping[str, Findings], points: Callable[[Findings], Sequence[T]], key: Callable[[T], Hashable]
) -> Iterator[tuple[Any, list[T], str]]:
    """The points of all logs, grouped by key and sorted: (key, points, the names of the points' logs)."""
    said = [(p, f"{path} ({each.about})") for path, each in findings.items() for p in points(each)]
    for name, some in sorted(grouped(said, lambda each: key(each[0])).items()):
        yield name, [point for point, _ in some], ", ".join(dict.fromkeys(source for _, source in some))


def _curve(
    form: str, values: Sequence[float], *columns: Sequence[float], fewest: int = _FEWEST
) -> tuple[tuple[float, ...], str] | None:
    """The coefficients of a form by least squares, and a text on the form, the number of points and the
    errors; None if the points have fewer than ``fewest`` sizes."""
    if len({*zip(*columns, strict=True)}) < fewest:
        return None
    fit = least_squares(values, *columns)
    off = f"off by {fit.mean_error:.1%} in the mean, {fit.largest_error:.1%} at most"
    return fit.coefficients, f"{form}, fitted to {len(values)} points, {off}"


def product_rates(findings: Mapping[str, Findings]) -> dict[str, Rate]:
    """By precision, the rate of matmuls: seconds = FLOPs / limit + bytes of operands and result / other."""
    rates = {}
    for precision, points, source in _by(findings, lambda each: each.matmuls, lambda each: each.precision):
        seconds, flops = [p.seconds for p in points], [p.flops for p in points]
        best = max(work / time for work, time in zip(flops, seconds, strict=True))
        rates[precision] = Rate(best, best, None, "the best matmul; most shapes reach less", source)
        curve = _curve("FLOPs / limit + bytes / bandwidth", seconds, flops, [p.nbytes for p in points])
        if curve and curve[0][0]:
            (flop_s, byte_s), how = curve
            rates[precision] = Rate(best, 1 / flop_s, 1 / byte_s if byte_s else None, how, source)
    return rates


def attention_rates(findings: Mapping[str, Findings]) -> dict[tuple[str, int, str, str], Rate]:
    """By kernel, head size, mask and direction, the rate: FLOPs per second = limit / (1 + other / length)."""
    rates = {}

    def key(point: AttentionSpeed) -> Hashable:
        return point.kernel, point.head_size, point.mask, point.direction or ""

    for name, points, source in _by(findings, lambda each: each.attention, key):
        longest = max(point.length for point in points)
        best = median(point.flops_per_s for point in points if point.length == longest)
        rates[name] = Rate(best, best, None, f"at {longest} tokens; too few lengths for a curve", source)
        slownesses, form = [1 / point.flops_per_s for point in points], "limit / (1 + half length / length)"
        curve = _curve(form, slownesses, [1.0] * len(points), [1 / point.length for point in points])
        if curve and curve[0][0]:
            (slowness, by_length), how = curve
            rates[name] = Rate(best, 1 / slowness, by_length / slowness or None, how, source)
    return rates


def memory_rate(findings: Mapping[str, Findings]) -> Rate | None:
    """The bytes per second of memory, fitted to passes too large for caches; None if there are none."""

    def large(each: Findings) -> list[TimedPass]:
        return [one for one in each.passes if one.nbytes >= LARGE_PASS_BYTES]

    for _, points, source in _by(findings, large, lambda each: 0):
        curve = _curve("bytes / bandwidth", [p.seconds for p in points], [p.nbytes for p in points], fewest=1)
        assert curve is not None
        best = max(point.nbytes / point.seconds for point in points)
        return Rate(best, 1 / curve[0][0], None, f"element-wise kernels, {curve[1]}", source)
    return None


def launch_gap(findings: Mapping[str, Findings]) -> tuple[float, str, str] | None:
    """The median of the seconds between kernels, a text on the gaps, the logs; None for too few gaps."""
    for _, gaps, source in _by(findings, lambda each: each.launch_gaps_s, lambda each: 0):
        if len(gaps) >= _FEWEST_GAPS:
            return median(gaps), f"median of {len(gaps)} gaps of a stream, with a profiler at work", source
    return None


def collective_rates(findings: Mapping[str, Findings]) -> dict[tuple[str, int, int], Rate]:
    """By collective, nodes and ranks, the rate: seconds = other + wire bytes / limit. A collective whose time
    does not grow with its bytes is left out."""
    rates = {}

    def key(point: TimedCollective) -> Hashable:
        return point.collective, point.nodes, point.ranks

    for name, points, source in _by(findings, lambda each: each.collectives, key):
        share = float(WIRE_SHARE[name[0]](name[2]))
        moved = [share * point.nbytes for point in points]
        seconds = [point.seconds for point in points]
        largest = max(range(len(points)), key=lambda i: moved[i])
        best = moved[largest] / seconds[largest]
        form, ones = "latency + wire bytes / bandwidth", [1.0] * len(points)
        if (curve := _curve(form, seconds, ones, moved)) is None:
            how = f"{points[largest].nbytes} bytes; too few sizes for a latency"
            rates[name] = Rate(best, best, None, how, source)
        elif byte_s := curve[0][1]:
            rates[name] = Rate(best, 1 / byte_s, curve[0][0], curve[1], source)
    return rates
