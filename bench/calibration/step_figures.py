"""Figures of a cluster that follow from the points of training steps: operators, products, calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import log2
from statistics import fmean

from spbench.bench.calibration.least_squares import LeastSquares, least_squares
from spbench.bench.calibration.operator_times import OPERATOR, PRODUCT, STEP
from spbench.bench.calibration.rate_points import RatePoint
from spbench.bench.clusters.rates import OperatorTimes

#: bytes below which calls of an operator take as long whatever their size
_SMALLEST = 4096
#: products of fewer FLOPs take little longer than their calls
_LEAST_FLOPS = 1e7
#: no step takes less beside its operators; where noise says so, it counts as this
_LEAST_S = 1e-4


def operator_times(points: Sequence[RatePoint]) -> dict[str, OperatorTimes]:
    """Of each operator the mean bytes and seconds of its calls, by powers of two of bytes."""
    found: dict[str, dict[int, list[RatePoint]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point.operation.startswith(OPERATOR):
            size = int(log2(max(point.nbytes, _SMALLEST)))
            found[point.operation.removeprefix(OPERATOR)][size].append(point)
    return {
        name: [
            [fmean(p.nbytes for p in alike), fmean(p.seconds for p in alike)]
            for _, alike in sorted(by_size.items())
        ]
        for name, by_size in sorted(found.items())
    }


def product_fit(points: Sequence[RatePoint], precision: str) -> LeastSquares | None:
    """Seconds a FLOP and a byte of the products inside steps; None where there are none."""
    chosen = [
        p for p in points if p.operation == PRODUCT and p.precision == precision and p.flops >= _LEAST_FLOPS
    ]
    if not chosen:
        return None
    return least_squares([p.seconds for p in chosen], [p.flops for p in chosen], [p.nbytes for p in chosen])


def host_fit(points: Sequence[RatePoint], counts: Sequence[Sequence[int]]) -> LeastSquares:
    """Seconds of an operator, a view, a node of autograd, a module's call and a step, beside the operators'
    own, by which the steps that were timed come out best.

    Args:
        counts: of each of these steps, how many operators, views, nodes and modules there are.
    """
    beside = [point for point in points if point.operation == STEP]
    columns = [[float(n) for n in column] for column in zip(*counts, strict=True)]
    return least_squares([max(p.seconds, _LEAST_S) for p in beside], *columns, [1.0] * len(beside))
