"""The number of tokens that each rank sends to each expert, which every rank computes from a routing plan.

Letters: L positions of a sequence, E experts, P ranks along ep and etp together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from spbench.impls.dispatchers.dispatcher import Counts, ExpertCall
from spbench.impls.folding import FOLDED_AXES, members, stage_ranks
from spbench.impls.place import Place
from spbench.impls.routing import capacity_of, taken

if TYPE_CHECKING:
    from spbench.impls.strategies.base import Strategy


def positions_of(strategy: Strategy, place: Place, length: int) -> np.ndarray:
    """The positions of a sequence that a rank has between blocks, int64 [L or a part].

    Args:
        strategy: the strategy, on any rank of the mesh.
        place: the place of the rank in question, which needs no process groups.
    """
    return _Chain(strategy.outermost).positions(place, length)


def sent_tokens(call: ExpertCall, strategy: Strategy, batch: int, length: int) -> np.ndarray:
    """The tokens that each rank which shares experts with this rank sends to each expert, without tokens
    beyond capacity, int64 [P, E].

    Args:
        batch: samples of a micro-batch of one replica.
        length: L, the positions of a sequence.
    """
    place = strategy.place
    numbers = members(place.stage_rank, FOLDED_AXES, place.sizes)
    sent = [_of_rank(call, strategy, number, batch, length) for number in numbers]
    return np.stack(sent)


def planned_counts(
    call: ExpertCall, strategy: Strategy, batch: int, length: int, parts: Sequence[int] = ()
) -> Counts:
    """The counts of tokens that each rank which shares experts with this rank sends; the arguments are as in
    :func:`sent_tokens`, and ``parts`` is :attr:`Dispatcher.parts`."""
    met = [_met(call, strategy, batch, length, part) for part in parts]
    return Counts(sent_tokens(call, strategy, batch, length), met)


def _met(call: ExpertCall, strategy: Strategy, batch: int, length: int, part: int) -> np.ndarray:
    """The tokens of each rank that have an expert in each of ``part`` equal runs of experts [P, part]."""
    place, of_ranks = strategy.place, []
    sizes = {axis: n for axis, n in place.sizes.items() if axis != "pp"}
    for number in members(place.stage_rank, FOLDED_AXES, place.sizes):
        positions = positions_of(strategy, Place.of_rank(sizes, number), length)
        run = call.plan.of_positions(length)[positions] * part // call.plan.experts
        hit = np.zeros((len(run), part), dtype=bool)
        hit[np.arange(len(run))[:, None], run] = True
        of_ranks.append(hit.sum(0) * batch)
    return np.stack(of_ranks)


def rows_of_ranks(call: ExpertCall, strategy: Strategy, batch: int, length: int) -> np.ndarray:
    """The number of rows that each rank's experts get, int64 [ranks of the pipeline stage]; the arguments are
    as in :func:`sent_tokens`."""
    place = strategy.place
    sharing, ep, etp = place.size(*FOLDED_AXES), place.size("ep"), place.size("etp")
    of_experts = _of_stage(call, strategy, batch, length).reshape(-1, sharing, call.plan.experts).sum(1)
    # the ranks along etp have parts of the same experts
    return of_experts.reshape(len(of_experts), ep, -1).sum(2).repeat(etp, axis=1).ravel()


def dropped_tokens(call: ExpertCall, strategy: Strategy, batch: int, length: int) -> int:
    """The number of rows dropped because an expert's capacity is full, in one block and micro-batch of all
    replicas; the arguments are as in :func:`sent_tokens`."""
    if call.capacity is None:
        return 0
    calls = replace(call, capacity=None, padded=False), replace(call, padded=False)
    sent, accepted = (int(_of_stage(each, strategy, batch, length).sum()) for each in calls)
    return sent - accepted


def _of_stage(call: ExpertCall, strategy: Strategy, batch: int, length: int) -> np.ndarray:
    """The tokens that each rank of a pipeline stage sends to each expert [ranks of the stage, E]."""
    ranks = range(stage_ranks(strategy.place.sizes))
    return np.stack([_of_rank(call, strategy, number, batch, length) for number in ranks])


def _of_rank(call: ExpertCall, strategy: Strategy, number: int, batch: int, length: int) -> np.ndarray:
    """The tokens that rank ``number`` of the pipeline stage sends to each expert [E]."""
    sizes = {axis: n for axis, n in strategy.place.sizes.items() if axis != "pp"}
    place = Place.of_rank(sizes, number)
    # ranks that differ along other axes have the same positions
    along = {axis: place.coordinates[axis] for axis in strategy.outermost.nested_axes}
    return _of_place(call, _Chain(strategy.outermost), tuple(along.items()), batch, length)


class _Chain:
    """The part of a strategy that decides ranks' positions, without its process groups: a key for caches."""

    def __init__(self, strategy: Strategy):
        self.sizes = dict(strategy.place.sizes)
        self.parts = strategy.sequence_parts
        self.key = (
            tuple((type(each), each.options, each.axes, each.packed) for each in strategy.nested()),
            tuple(sorted(strategy.place.sizes.items())),
        )

    def positions(self, place: Place, length: int) -> np.ndarray:
        """The positions [L or a part] of the rank at ``place``, as :func:`positions_of` returns them."""
        from torch.utils._python_dispatch import _disable_current_modes

        if self.parts == 1:
            return np.arange(length)
        with _disable_current_modes(), torch.no_grad():
            whole = torch.arange(length, device="cpu")
            return self._planned(place).shard(whole, 0).numpy().copy()

    def _planned(self, place: Place) -> Strategy:
        """The outermost strategy of the chain, for a rank at this place."""
        strategy: Strategy | None = None
        for cls, options, axes, packed in reversed(self.key[0]):
            strategy = cls(place, options, within=strategy, axes=axes)
            strategy.packed = packed
        assert strategy is not None
        return strategy

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Chain) and self.key == other.key


@lru_cache(maxsize=4096)
def _of_place(
    call: ExpertCall, chain: _Chain, along: Sequence[tuple[str, int]], batch: int, length: int
) -> np.ndarray:
    place = Place(dict(chain.sizes), dict(along))
    positions = chain.positions(place, length)
    tokens = call.plan.tokens(positions, length, batch)
    limit = capacity_of(len(positions) * batch, call.plan.per_token, call.plan.experts, call.capacity)
    return taken(tokens, limit, padded=call.padded)
