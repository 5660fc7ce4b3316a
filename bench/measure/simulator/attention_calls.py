"""The calls of softmax attention without scores in a program, by what their rate on a card depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from spbench.bench.measure.clusters.rates import Direction, Mask
from spbench.bench.measure.simulator.program import ATTENTION, Program

#: PRECISION_NAMES begin with so many half precisions, which attention kernels' rates are of
_HALVES = 2


class AttentionCall(NamedTuple):
    """Calls of a kernel that are alike.

    Attributes:
        heads: of all sequences.
        length: the lesser of queries and keys.
    """

    direction: Direction
    mask: Mask
    head_size: int
    heads: int
    keys: int
    length: int


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
        call = AttentionCall(direction, mask, int(head_size), int(heads), int(keys), length)
        yield call, at[places == place]
