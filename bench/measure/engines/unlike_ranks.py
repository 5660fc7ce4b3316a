"""Ranks with unlike work along a strategy's axis, and the ranks that are traced for them.

Under a causal mask a rank's work follows from the positions that it holds. With contiguous chunks rank r
attends to r + 1 blocks of keys; with zigzag all ranks attend to equally many; with packed documents the work
depends on the documents. Ranks of equal work are one class. If there are more than MOST_SETS kinds of work,
ranks of similar work share a class (:func:`roles_by_load`), and :func:`work_error` bounds the error.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spbench import impls
from spbench.bench.cell import Cell
from spbench.bench.measure.simulator.lighter_ranks import odd_sets

#: the most sets into which the ranks of a role are divided by their work
MOST_SETS = 8


class Load(NamedTuple):
    """A rank's work in layers where positions attend to each other; sorted loads have the heaviest last.

    Attributes:
        pairs: pairs of a query and a key that the rank computes in one head, summed over layers.
        documents: the documents of which the rank has a part, if each document has states of its own.
        parts: the length of the rank's part of each of these documents.
    """

    pairs: int
    documents: int = 0
    parts: tuple[int, ...] = ()


#: layers with attention under a causal mask: (the kind of their sites, their window, the number of layers)
_Layers = tuple[tuple[str, int | None, int], ...]


def _attention_of(cell: Cell) -> tuple[impls.Attended, _Layers]:
    """(the positions to which a position of the cell's sequences attends, the layers with attention)."""
    return _attention_in(json.dumps(cell.model_arguments), cell.shape[1])


@lru_cache(maxsize=256)
def _attention_in(model: str, length: int) -> tuple[impls.Attended, _Layers]:
    preset = impls.model_preset(*json.loads(model))
    layers = tuple(
        (site.kind, site.dims.get("window"), site.count)
        for site in preset.sites(1, length)
        if site.kind in ("causal_attention", "linear_attention")
    )
    return preset.attended(length), layers


def loads_along(cell: Cell, axis: str) -> Sequence[Load]:
    """The load of each rank along an axis of the strategy."""
    options = json.dumps(cell.strategy_options, sort_keys=True)
    attended, layers = _attention_of(cell)
    mesh = tuple(cell.mesh_sizes.items())
    return _loads(cell.strategy, mesh, axis, options, attended, cell.shape[1], layers)


@lru_cache(maxsize=64)
def _loads(
    strategy: str,
    mesh: tuple[tuple[str, int], ...],
    axis: str,
    options: str,
    attended: impls.Attended,
    length: int,
    layers: _Layers,
) -> Sequence[Load]:
    nested, sizes = impls.nesting(strategy), dict(mesh)
    chosen: Mapping[str, Any] = json.loads(options)

    def load(each: impls.Strategy) -> Load:
        parts = each.document_parts(attended, length)
        pairs = 0
        for kind, window, count in layers:
            if kind == "linear_attention":
                pairs += count * each.scored_pairs(length)
            else:
                pairs += count * each.attended_pairs(attended.in_layer(window, length), length)
        return Load(pairs, len(parts), tuple(parts))

    def of_rank(rank: int) -> Load:
        return load(nested.configured(impls.Place(sizes, {axis: rank}), chosen))

    first, last = of_rank(0), of_rank(sizes[axis] - 1)
    # for one text the work grows with the rank, or is even, so equal ends mean equal loads
    if sizes[axis] == 1 or (not attended.documents and first == last):
        return [first] * sizes[axis]
    return [first, *map(of_rank, range(1, sizes[axis] - 1)), last]


def _is_plain_text(cell: Cell) -> bool:
    """Whether every layer attends to all earlier positions of one text, without windows or documents."""
    attended, layers = _attention_of(cell)
    return attended.plain and all(window is None for _, window, _ in layers)


def is_uneven_text(cell: Cell) -> bool:
    """Whether ranks have unlike work in one text, so that a balanced placement would help."""
    return _is_plain_text(cell) and bool(_unlike(cell))


def marked_axis(cell: Cell) -> str | None:
    """The axis along which ranks have unlike work, but the last rank's step contains and marks the work of
    all ranks (``marks_all_work``), so that the ranks are one class; None: there is no such axis."""
    if not _is_plain_text(cell):
        return None
    strategy = impls.nesting(cell.strategy)
    for axis in strategy.axes:
        # the last rank has most, as chunks lie in the order of the sequence
        pairs = [load.pairs for load in loads_along(cell, axis)]
        of_all = [rank for role in strategy.roles(axis, len(pairs)) for rank in role]
        one_role = len(strategy.roles(axis, len(pairs))) == 1 and of_all[0] == len(pairs) - 1
        if one_role and pairs != pairs[:1] * len(pairs) and strategy.owner(axis).marks_all_work():
            return axis
    return None


def _unlike(cell: Cell) -> list[Sequence[Load]]:
    """The ranks' loads along each axis of the strategy on which ranks have unlike loads."""
    along = (loads_along(cell, axis) for axis in impls.nesting(cell.strategy).axes)
    return [loads for loads in along if len(set(loads)) > 1]


def imbalance(cell: Cell) -> float | None:
    """The most query-key pairs of any rank over the mean of all ranks (1 or more); None if all ranks have
    equal loads in one unpacked text."""
    unlike = _unlike(cell)
    if not unlike and _attention_of(cell)[0].plain:
        return None
    of_axes = ([load.pairs for load in loads] for loads in unlike)
    return math.prod((max(pairs) * len(pairs) / sum(pairs) for pairs in of_axes if any(pairs)), start=1.0)


def expert_load(cell: Cell) -> dict[str, Any]:
    """The fields of a measurement that say how unevenly tokens go to experts: ``expert_imbalance``,
    ``dropped_tokens`` and ``routing``; none for a model without experts."""
    if (asked := _asked_of_experts(cell)) is None:
        return {}
    call = asked[0]
    rows, dropped = impls.rows_of_ranks(*asked), impls.dropped_tokens(*asked) * cell.training.micro_batches
    routing = "learned" if call.learned else call.plan.routing
    if call.learned and cell.engine == "virtual":
        routing = "learned, taken as even"
    return {
        "expert_imbalance": float(rows.max() / rows.mean()) if rows.any() else 1.0,
        "dropped_tokens": dropped,
        "routing": routing,
    }


def expert_rows(cell: Cell) -> np.ndarray | None:
    """[ranks of a pipeline stage]: the tokens that each rank's experts get, by the routing that the cell
    forces; None if routing is even, or the model has no experts."""
    asked = _asked_of_experts(cell)
    return None if asked is None or asked[0].plan.routing == impls.EVEN else impls.rows_of_ranks(*asked)


def _asked_of_experts(cell: Cell) -> tuple[impls.ExpertCall, impls.Strategy, int, int] | None:
    """The arguments of :func:`rows_of_ranks`; None for a model without experts."""
    batch, seq_len = cell.shape
    of_replica = max(1, batch // cell.sizes.dp // cell.training.micro_batches)
    sites = impls.model_preset(*cell.model_arguments).sites(of_replica, seq_len)
    call = next((site.experts for site in sites if site.experts is not None), None)
    if call is None:
        return None
    strategy = impls.nesting(cell.strategy).configured(impls.Place(cell.mesh_sizes), cell.strategy_options)
    return call, strategy, of_replica, seq_len


def fullest_rank(cell: Cell, ranks: Sequence[int], rows: np.ndarray, marked: str | None) -> int:
    """The rank of a class whose experts get most tokens. The other ranks wait for this rank, whose peak is
    the largest.

    Args:
        rows: see :func:`expert_rows`.
        marked: see :func:`marked_axis`; only ranks with the first rank's place along this axis count.
    """
    places = {rank: impls.Place.of_rank(cell.mesh_sizes, rank) for rank in ranks}
    first = places[ranks[0]]
    able = [rank for rank in ranks if not marked or places[rank].rank(marked) == first.rank(marked)]
    return max(able, key=lambda rank: rows[places[rank].stage_rank])


def work_error(cell: Cell) -> float | None:
    """The largest difference in query-key pairs between a rank and the rank that is traced for it, over the
    mean of all ranks; None if each rank has exactly the pairs of its traced rank."""
    strategy, error, marked = impls.nesting(cell.strategy), 0.0, marked_axis(cell)
    for axis in strategy.axes:
        if axis == marked:
            continue
        loads = loads_along(cell, axis)
        mean = sum(load.pairs for load in loads) / len(loads)
        for ranks in roles_by_load(strategy.roles(axis, len(loads)), loads):
            off = (abs(loads[rank].pairs - loads[ranks[0]].pairs) for rank in ranks)
            error = max(error, max(off) / mean if mean else 0.0)
    return error or None


def roles_by_load(roles: Sequence[Sequence[int]], loads: Sequence[Load]) -> list[list[int]]:
    """The ranks of each role, divided by their load into at most MOST_SETS sets. The first rank of each set
    is traced for the set.

    If a role has more kinds of load, its heaviest rank is a set of its own, since other ranks wait for it and
    its peak is the largest; the other ranks are in sets of neighbours by load (:func:`odd_sets`).
    """
    groups: list[list[int]] = []
    for ranks in roles:
        distinct = sorted({loads[rank] for rank in ranks}, reverse=True)
        if len(distinct) == 1:
            groups.append([*ranks])
            continue
        order = sorted(sorted(ranks), key=lambda rank: loads[rank], reverse=True)
        if len(distinct) <= MOST_SETS:
            groups += [[rank for rank in order if loads[rank] == each] for each in distinct]
            continue
        groups += [[order[place] for place in each] for each in odd_sets(len(order), MOST_SETS)]
    return groups
