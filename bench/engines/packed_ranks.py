"""What ranks attend to where sequences are packed of documents: how even it is, and which ranks stand for
which."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from spbench.bench.cell import Cell
from spbench.impls.attended import Attended
from spbench.impls.axes import Place
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.nesting import nesting

#: sets of ranks at most, of those that attend to much alike; the one of each that attends to most is traced
MOST_SETS = 8


class Load(NamedTuple):
    """What a rank has of packed sequences, the heaviest last where sorted.

    Attributes:
        pairs: queries and keys that meet, in a head.
        documents, parts: where states begin anew in each document, how many it has some of, and their parts'
            lengths: each has states of its own.
    """

    pairs: int
    documents: int = 0
    parts: tuple[int, ...] = ()


def attended_of(cell: Cell) -> Attended:
    """What positions of the cell's sequences attend to."""
    return model_preset(*cell.model_arguments).attended(cell.shape[1])


def loads_along(cell: Cell, axis: str) -> Sequence[Load]:
    """What each of the ranks along an axis of the strategy has to do."""
    options = json.dumps(cell.strategy_options, sort_keys=True)
    return _loads(
        cell.strategy, tuple(cell.mesh_sizes.items()), axis, options, attended_of(cell), cell.shape[1]
    )


@lru_cache(maxsize=64)
def _loads(
    strategy: str,
    mesh: tuple[tuple[str, int], ...],
    axis: str,
    options: str,
    attended: Attended,
    length: int,
) -> Sequence[Load]:
    found, sizes = nesting(strategy), dict(mesh)
    chosen: Mapping[str, Any] = json.loads(options)
    ranks = [found.configured(Place(sizes, {axis: rank}), chosen) for rank in range(sizes[axis])]
    return [
        Load(each.attended_pairs(attended, length), len(parts), tuple(parts))
        for each in ranks
        for parts in [each.document_parts(attended, length)]
    ]


def imbalance(cell: Cell) -> float | None:
    """The pairs of the rank that has most over their mean; None where sequences are not packed."""
    if attended_of(cell).plain:
        return None
    most = 1.0
    for axis in nesting(cell.strategy).axes:
        pairs = [load.pairs for load in loads_along(cell, axis)]
        most *= max(pairs) * len(pairs) / sum(pairs)
    return most


def roles_by_load(roles: Sequence[Sequence[int]], loads: Sequence[Load]) -> list[list[int]]:
    """The roles of ranks, with those of a role apart that have more or less to do: MOST_SETS sets of each at
    most, the first rank of each the one that has most."""
    found = []
    for ranks in roles:
        order = sorted(sorted(ranks), key=lambda rank: loads[rank], reverse=True)
        distinct = sorted({loads[rank] for rank in ranks}, reverse=True)
        if len(distinct) <= MOST_SETS:
            found += [[rank for rank in order if loads[rank] == each] for each in distinct]
            continue
        ends = [len(order) * i // MOST_SETS for i in range(MOST_SETS + 1)]
        found += [order[a:b] for a, b in pairwise(ends)]
    return found
