"""What the kernels of a step are: seconds by their kind, and the FLOPs that its model has."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spbench.bench.measure.simulator.program import (
    ATTENTION,
    COMPUTE_STREAM,
    KERNEL,
    MATRIX_PRODUCT,
    MEMORY_BOUND,
    Program,
)


def seconds_by_kind(program: Program, kernel_s: np.ndarray) -> dict[str, float]:
    """Seconds of the kernels of the compute stream by their kind.

    Args:
        kernel_s: of each event.
    """
    of_compute = (program.kind == KERNEL) & (program.stream == COMPUTE_STREAM)
    attention = (program.category == ATTENTION) & (program.flops > 0)  # a softmax alone moves bytes
    products = program.category == MATRIX_PRODUCT
    kinds = {"products": products, "attention": attention, "memory_bound": ~(products | attention)}
    return {name: float(kernel_s[of_compute & of_kind].sum()) for name, of_kind in kinds.items()}


class Flops(NamedTuple):
    """FLOPs of products and attention: of ``forward`` phases, of the softmax ``attention`` in these, and of
    ``all`` phases, with what backward computes again."""

    forward: float
    attention: float
    all: float

    def times(self, number: float) -> Flops:
        """Those of that many ranks."""
        return Flops(*(number * each for each in self))

    def plus(self, other: Flops) -> Flops:
        """These and others."""
        return Flops(*(a + b for a, b in zip(self, other, strict=True)))


def flops_of(program: Program, weights: np.ndarray | None = None) -> Flops:
    """The FLOPs of a rank.

    Args:
        weights: how much of each event it does; None: all.
    """
    flops = program.flops if weights is None else program.flops * weights
    counted = np.where((program.kind == KERNEL) & (program.category != MEMORY_BOUND), flops, 0.0)
    attention, ends = program.category == ATTENTION, [first for _, first in program.marks[1:]]
    total = Flops(0.0, 0.0, float(counted.sum()))
    for (phase, first), end in zip(program.marks, [*ends, len(program)], strict=True):
        if phase == "forward":
            here = counted[first:end]
            of_attention = float(here[attention[first:end]].sum())
            total = total.plus(Flops(float(here.sum()), of_attention, 0.0))
    return total
