"""What the kernels of a step are: seconds by their kind, the FLOPs of its model, and the calls of softmax
attention by what their rate on a card depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from spbench.bench.measure.clusters.rates import Direction, Mask
from spbench.bench.measure.simulator.program import (
    ATTENTION,
    COMPUTE_STREAM,
    KERNEL,
    MATMUL,
    MEMORY_BOUND,
    Program,
)

#: PRECISION_NAMES begin with so many half precisions, which attention kernels' rates are of
_HALVES = 2


class AttentionCall(NamedTuple):
    """Calls of a kernel that are alike.

    Attributes:
        heads: of all sequences.
        length: the lesser of queries and keys.
        queries: of each.
    """

    direction: Direction
    mask: Mask
    head_size: int
    heads: int
    keys: int
    length: int
    queries: int


def attention_calls(program: Program) -> Iterator[tuple[AttentionCall, np.ndarray]]:
    """The calls in half precisions that make no scores, each kind of them with the program's events."""
    attends = (program.category == ATTENTION) & (program.precision < _HALVES) & program.shape.any(axis=1)
    calls = np.column_stack([program.name[attends], program.shape[attends], program.flops[attends]])
    # the calls of a ring are the same one after another
    first = np.append(True, (calls[1:] != calls[:-1]).any(1))[: len(calls)]
    kinds, places = np.unique(calls[first], axis=0, return_inverse=True)
    places = places.ravel()[np.cumsum(first) - 1]
    at = np.flatnonzero(attends)
    for place, (name, heads, queries, keys, head_size, flops) in enumerate(kinds):
        backward = program.names[int(name)].endswith("_backward")
        pairs = flops / (2 * head_size * (5 if backward else 2))  # as forward_flops and backward_flops
        mask: Mask = "causal" if pairs < heads * queries * keys else "whole"
        direction: Direction = "backward" if backward else "forward"
        length = min(int(queries), int(keys))
        call = AttentionCall(direction, mask, int(head_size), int(heads), int(keys), length, int(queries))
        yield call, at[places == place]


def seconds_by_kind(program: Program, kernel_s: np.ndarray) -> dict[str, float]:
    """Seconds of the kernels of the compute stream by their kind.

    Args:
        kernel_s: of each event.
    """
    of_compute = (program.kind == KERNEL) & (program.stream == COMPUTE_STREAM)
    attention = (program.category == ATTENTION) & (program.flops > 0)  # a softmax alone moves bytes
    matmuls = program.category == MATMUL
    kinds = {"matmul": matmuls, "attention": attention, "memory_bound": ~(matmuls | attention)}
    return {name: float(kernel_s[of_compute & of_kind].sum()) for name, of_kind in kinds.items()}


class Flops(NamedTuple):
    """FLOPs of matmuls and attention: of ``forward`` phases, of the softmax ``attention`` in these, and of
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
