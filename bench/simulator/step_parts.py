"""What the kernels of a step are: seconds by their kind, and the FLOPs that its model has."""

from __future__ import annotations

import numpy as np

from spbench.bench.simulator.program import (
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


def forward_flops(program: Program, weights: np.ndarray | None = None) -> float:
    """FLOPs of a rank's products and attention in forward phases.

    Args:
        weights: how much of each event it does; None: all.
    """
    flops = program.flops if weights is None else program.flops * weights
    counted = (program.kind == KERNEL) & (program.category != MEMORY_BOUND)
    total, ends = 0.0, [first for _, first in program.marks[1:]] + [len(program)]
    for (phase, first), end in zip(program.marks, ends, strict=True):
        if phase == "forward":
            total += float(flops[first:end][counted[first:end]].sum())
    return total
