"""What ranks attend to where sequences are packed of documents: how even it is, and which ranks stand for
which."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from spbench.bench.cell import Cell
from spbench.impls.attended import Attended
from spbench.impls.axes import Place
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.nesting import nesting

#: sets of ranks at most, of those that attend to much alike; the one of each that attends to most is traced
MOST_SETS = 8


def attended_of(cell: Cell) -> Attended:
    """What positions of the cell's sequences attend to."""
    return model_preset(*cell.model_arguments).attended(cell.shape[1])


def pairs_along(cell: Cell, axis: str) -> Sequence[int]:
    """Queries and keys that meet, in a head, on each of the ranks along an axis of the strategy."""
    options = json.dumps(cell.strategy_options, sort_keys=True)
    return _pairs(
        cell.strategy, tuple(cell.mesh_sizes.items()), axis, options, attended_of(cell), cell.shape[1]
    )


@lru_cache(maxsize=64)
def _pairs(
    strategy: str,
    mesh: tuple[tuple[str, int], ...],
    axis: str,
    options: str,
    attended: Attended,
    length: int,
) -> Sequence[int]:
    found, sizes = nesting(strategy), dict(mesh)
    chosen: Mapping[str, Any] = json.loads(options)
    return [
        found.configured(Place(sizes, {axis: rank}), chosen).attended_pairs(attended, length)
        for rank in range(sizes[axis])
    ]


def imbalance(cell: Cell) -> float | None:
    """The pairs of the rank that has most over their mean; None where sequences are not packed."""
    if attended_of(cell).plain:
        return None
    most = 1.0
    for axis in nesting(cell.strategy).axes:
        pairs = pairs_along(cell, axis)
        most *= max(pairs) * len(pairs) / sum(pairs)
    return most


def roles_by_pairs(roles: Sequence[Sequence[int]], pairs: Sequence[int]) -> list[list[int]]:
    """The roles of ranks, with those of a role apart that attend to more or less: MOST_SETS sets of each at
    most, the first rank of each the one that attends to most."""
    found = []
    for ranks in roles:
        order = sorted(ranks, key=lambda rank: (-pairs[rank], rank))
        distinct = sorted({pairs[rank] for rank in ranks}, reverse=True)
        if len(distinct) <= MOST_SETS:
            found += [[rank for rank in order if pairs[rank] == each] for each in distinct]
            continue
        ends = [len(order) * i // MOST_SETS for i in range(MOST_SETS + 1)]
        found += [order[a:b] for a, b in pairwise(ends)]
    return found
