"""Which rank updates which weight where an update needs the weight whole, as LayerWiseDistributedOptimizer of
Megatron-Core (core/optimizer/layer_wise_optimizer.py, commit d98e8a64) has it.

By default a bucket is packed so that each rank's part of it has whole weights. Without that layout
(--no-use-layer-wise-param-layout) gradients are summed on all ranks, weights are dealt out by size, and
those that a rank has updated are sent to the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.buffer_layout import BucketLayout, Sharding

#: share of elements that a rank may have above the mean of a bucket, and of a bucket's least size by its
#: largest weight
_SLACK, _FLOOR = 0.3, 0.9


def packed(shapes: Sequence[torch.Size], full_at: int | None, sharding: Sharding) -> list[BucketLayout]:
    """The buckets of a buffer of matrices [..., rows, H], no one of which is cut over ranks.

    Args:
        shapes: in the order of registration.
        full_at: elements at which a bucket is full; None: there is one bucket.
    """
    loads, buckets, members = [0] * sharding.ranks, list[BucketLayout](), list[int]()
    end, filled = 0, [0] * sharding.ranks

    def close() -> None:
        nonlocal end, filled
        buckets.append(_bucket(members, shapes, end, loads, sharding))
        end, filled = buckets[-1].end, [0] * sharding.ranks
        members.clear()

    for number in reversed(range(len(shapes))):
        elements = shapes[number].numel()
        if full_at is not None and members:
            sizes = [shapes[i].numel() for i in members]
            enough = max(full_at, int(sharding.ranks * max(sizes) * _FLOOR))
            room = _rounded(max(filled), sharding)
            if sum(sizes) >= enough and sharding.padded_start(min(filled)) + elements > room:
                close()
        least = filled.index(min(filled))
        filled[least] = sharding.padded_start(filled[least]) + elements
        members.append(number)
    close()
    return buckets


def _bucket(
    members: Sequence[int],
    shapes: Sequence[torch.Size],
    start: int,
    loads: list[int],
    sharding: Sharding,
) -> BucketLayout:
    """A bucket whose members go to the rank with the least work so far, the largest first; ``loads``, the
    work of each rank, is added to."""
    ranks = range(sharding.ranks)
    most = sum(shapes[i].numel() for i in members) / sharding.ranks * (1 + _SLACK)
    parts: list[list[tuple[int, int]]] = [[] for _ in ranks]
    filled = [0] * sharding.ranks
    for number in sorted(members, key=lambda i: -_work(shapes[i])):
        elements = shapes[number].numel()
        fits = [rank for rank in ranks if sharding.padded_start(filled[rank]) + elements <= most]
        rank = min(fits, key=loads.__getitem__) if fits else min(ranks, key=filled.__getitem__)
        first = sharding.padded_start(filled[rank])
        parts[rank].append((number, first))
        filled[rank] = first + elements
        loads[rank] += _work(shapes[number])
    each = _rounded(max(filled), sharding)
    placed = [(number, start + rank * each + first) for rank in ranks for number, first in parts[rank]]
    numbers, starts = zip(*placed, strict=True)
    return BucketLayout(start, start + sharding.ranks * each, numbers, starts)


def _work(shape: torch.Size) -> int:
    """What the Newton-Schulz steps of a matrix cost, but for a factor."""
    longer, shorter = sorted((math.prod(shape[:-1]), shape[-1]), reverse=True)
    return longer * shorter * shorter


def _rounded(elements: int, sharding: Sharding) -> int:
    """Elements of a rank's part, which keep a bucket's end where it may be."""
    multiple = math.lcm(64, sharding.padded_end(1) // sharding.ranks)
    return math.ceil(elements / multiple) * multiple


def dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that updates each weight: from the smallest on to all ranks in turn, there and back."""
    owners = [0] * len(sizes)
    turns = [*range(ranks), *reversed(range(ranks))]
    for place, number in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        owners[number] = turns[place % len(turns)]
    return owners


class Dealt:
    """Weights of which each rank of a group updates some.

    Attributes:
        owners: the rank that updates each.
    """

    def __init__(self, weights: Sequence[nn.Parameter], group: dist.ProcessGroup):
        self.weights, self.group = weights, group
        self.owners = dealt([w.numel() for w in weights], group.size())

    def of_others(self) -> list[nn.Parameter]:
        """The weights that other ranks update."""
        own = self.group.rank()
        return [w for w, owner in zip(self.weights, self.owners, strict=True) if owner != own]

    @torch.no_grad()
    def spread(self) -> None:
        """Send each weight from its owner to the other ranks, all of an owner in one message."""
        own = self.group.rank()
        of_ranks: list[list[Tensor]] = [[] for _ in range(self.group.size())]
        for weight, owner in zip(self.weights, self.owners, strict=True):
            of_ranks[owner].append(weight.detach())
        some = self.weights[0].detach()
        messages = [some.new_empty(sum(w.numel() for w in mine)) for mine in of_ranks]
        for held, part in zip(of_ranks[own], _parts(messages[own], of_ranks[own]), strict=True):
            part.copy_(held)
        for rank, message in enumerate(messages):
            if message.numel():
                dist.broadcast(message, group=self.group, group_src=rank)
        for rank, (message, mine) in enumerate(zip(messages, of_ranks, strict=True)):
            if rank != own:
                for held, part in zip(mine, _parts(message, mine), strict=True):
                    held.copy_(part)


def _parts(message: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The part of each weight in a message, in its shape."""
    parts = message.split([w.numel() for w in weights])
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=False)]
