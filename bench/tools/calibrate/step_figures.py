"""Figures of a cluster that follow from the points of training steps: operators, products, calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import log2
from statistics import fmean, median

from spbench.bench.measure.clusters.rates import OperatorTimes
from spbench.bench.tools.calibrate.compute_rates import RatePoint
from spbench.bench.tools.calibrate.operator_times import (
    BACKWARD,
    BARE,
    MODULE,
    OPERATOR,
    PRODUCT,
    STEP,
    VIEW,
    WITH_NODE,
)
from spbench.bench.tools.calibrate.rate_fits import LeastSquares, least_squares

#: bytes below which calls of an operator take as long whatever their size
_SMALLEST = 4096
#: products of fewer FLOPs take little longer than their calls
_LEAST_FLOPS = 1e7
_ALONE = (WITH_NODE, BARE, VIEW, BACKWARD, MODULE)


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
    """Seconds a FLOP and a byte of the products inside steps; None where no point is of a large one."""
    chosen = [
        p for p in points if p.operation == PRODUCT and p.precision == precision and p.flops >= _LEAST_FLOPS
    ]
    if not chosen:
        return None
    return least_squares([p.seconds for p in chosen], [p.flops for p in chosen], [p.nbytes for p in chosen])


def host_figures(points: Sequence[RatePoint], counts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Seconds of an operator, a view, a node of autograd and a module's call beside operators' own times, by
    calls of these alone; and of a step, the median of what is left of the steps that were timed.

    Args:
        counts: of each of these steps, how many operators, views, nodes and modules there are.
    """
    alone = {p.operation: p.seconds / p.extent for p in points if p.operation in _ALONE}
    bare = alone[BARE]
    found = {
        "operator_s": max(0.0, alone[WITH_NODE] - bare),
        "view_s": alone[VIEW],
        "node_s": max(0.0, alone[BACKWARD] - bare),
        "module_s": alone[MODULE],
    }
    beside = [point.seconds for point in points if point.operation == STEP]
    left = [
        taken - sum(n * each for n, each in zip(work, found.values(), strict=True))
        for taken, work in zip(beside, counts, strict=True)
    ]
    return found | {"step_s": max(0.0, median(left))}
