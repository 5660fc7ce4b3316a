"""Faults in attention to positions that an indexer chooses, spread over ranks."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from spbench.impls.collectives import all_gather, gather_from_group
from spbench.impls.kernels import chosen_attention
from spbench.impls.kernels.chosen_attention import Choice, Index, attention_to_chosen
from spbench.impls.strategies.gathered_latents import GatheredLatents
from spbench.impls.strategies.recurrence import RecurrenceHooks
from spbench.impls.strategies.sequence_chunks import chunk_of


class ZigzagChunks(GatheredLatents):
    """Ranks hold chunks r and 2N-1-r, and the gathered keys are taken to be in the order of positions."""

    def own(self, x: Tensor, dim: int) -> Tensor:
        parts = 2 * self.size
        return torch.cat([chunk_of(x, dim, n, parts) for n in (self.rank, parts - 1 - self.rank)], dim)


class ChosenOfTheLocalChunk(GatheredLatents):
    """Each rank chooses among its own positions."""

    def indexed_attention(self, q: Tensor, rows: Tensor, index: Index, how: Choice, *near: Any) -> Tensor:
        return attention_to_chosen(q, rows, index, how)


class StaleIndexKeys(GatheredLatents):
    """Each layer scores the index keys of the layer before."""

    _gathered: Tensor | None = None

    def indexed_attention(self, q: Tensor, rows: Tensor, index: Index, how: Choice, *near: Any) -> Tensor:
        keys, stale = all_gather(index.keys, 1, self.group), self._gathered
        self._gathered = keys
        index = index._replace(keys=keys if stale is None else stale)
        return attention_to_chosen(
            q, all_gather(rows, 1, self.group), index, how, self.rank * q.shape[1], *near
        )


def last_of_equals(scores: Tensor, count: int) -> Tensor:
    """The best positions, of which equal scores have the latest."""
    last = scores.shape[-1] - 1
    best, places = scores.flip(-1).sort(dim=-1, descending=True, stable=True)
    return torch.where(best > -torch.inf, last - places, -1)[..., :count].to(torch.int32)


class TiesInAnotherOrder(GatheredLatents):
    """Of equal scores the latest position is chosen, as by a top-k that begins at the end."""

    def indexed_attention(self, q: Tensor, rows: Tensor, index: Index, how: Choice, *near: Any) -> Tensor:
        with patch.object(chosen_attention, "best_positions", last_of_equals):
            return super().indexed_attention(q, rows, index, how, *near)


class RotatedKeysNotGathered(GatheredLatents):
    """The latents are gathered without the key features that RoPE turns: each rank repeats its own."""

    def indexed_attention(self, q: Tensor, rows: Tensor, index: Index, how: Choice, *near: Any) -> Tensor:
        latent, turned = rows.split([how.values, rows.shape[-1] - how.values], -1)
        whole = torch.cat((all_gather(latent, 1, self.group), turned.repeat(1, self.size, 1)), -1)
        index = index._replace(keys=all_gather(index.keys, 1, self.group))
        return attention_to_chosen(q, whole, index, how, self.rank * q.shape[1], *near)


class QueriesFromTheStart(GatheredLatents):
    """Each rank takes its queries for those at the sequence's start, so that they see too few keys."""

    def indexed_attention(self, q: Tensor, rows: Tensor, index: Index, how: Choice, *near: Any) -> Tensor:
        index = index._replace(keys=all_gather(index.keys, 1, self.group))
        return attention_to_chosen(q, all_gather(rows, 1, self.group), index, how)


class RowGradientsOfOwnQueries(GatheredLatents):
    """The gradients of latents from other ranks' queries are not summed."""

    def indexed_attention(self, q: Tensor, rows: Tensor, index: Index, how: Choice, *near: Any) -> Tensor:
        index = index._replace(keys=all_gather(index.keys, 1, self.group))
        rows = gather_from_group(rows, 1, self.group)
        return attention_to_chosen(q, rows, index, how, self.rank * q.shape[1], *near)


class NothingFromTheRankBefore(GatheredLatents):
    """A rank's first queries lack the rows before them, and its first block what the block before gives."""

    def rows_before(self, rows: Tensor) -> Tensor | None:
        return RecurrenceHooks.rows_before(self, rows)


class EdgeWithoutGradient(GatheredLatents):
    """The rank before gets no gradient of the rows that it passed on."""

    def rows_before(self, rows: Tensor) -> Tensor | None:
        before = super().rows_before(rows)
        return None if before is None else before.detach() + 0 * before.sum()


class EveryRankTheFirst(GatheredLatents):
    """Each rank takes its first block for the sequence's first, with nothing from a block before."""

    sequence_part = 0  # type: ignore[assignment]


class UnfinishedBlocks(GatheredLatents):
    """A query sees the block of its own position before the block ends."""

    def indexed_attention(
        self, q: Tensor, rows: Tensor, index: Index, how: Choice, near: Any = None
    ) -> Tensor:
        def seen(attended: Any, first: int, count: int, device: torch.device, block: int = 1) -> Tensor:
            return bounds(attended, first + block - 1, count, device, block)

        bounds = chosen_attention.seen_bounds
        with patch.object(chosen_attention, "seen_bounds", seen):
            return super().indexed_attention(q, rows, index, how, near)
