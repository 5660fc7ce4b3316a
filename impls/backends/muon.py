"""Muon (Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982) for weights that are
matrices, AdamW for other weights.

The update follows TensorParallelMuon of Megatron-Core (core/optimizer/emerging_optimizers.py, commit
d98e8a64) and Emerging-Optimizers (commit fd77292): a matrix has one moment, the mean of its gradients, whose
singular values Newton-Schulz steps bring near 1. These steps are matmuls in bfloat16 of float32 moments.
Megatron-Core orthogonalises queries', keys' and values' rows of one weight apart; in spbench a weight is one
matrix.

Which rank updates which weight where an update needs the weight whole, as LayerWiseDistributedOptimizer of
Megatron-Core (core/optimizer/layer_wise_optimizer.py, commit d98e8a64) has it.

By default a bucket is packed so that each rank's part of it has whole weights. Without that layout
(--no-use-layer-wise-param-layout) gradients are summed on all ranks, weights are dealt out by size, and
those that a rank has updated are sent to the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.backends.buffer_layout import BucketLayout, Sharding
from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.collectives import all_gather

#: coefficients of the Newton-Schulz steps, used in a cycle: "quintic" of Emerging-Optimizers
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
#: the factor of the running mean of gradients, and the weight decay
MOMENTUM, DECAY = 0.95, 0.01
#: an update's factor besides the root of the longer side, so that its size is AdamW's (arXiv 2502.16982)
SCALE = 0.2


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates a parameter: a matrix that is no word embedding and no head, or a weight of
    several projections [n, rows, H]."""
    parts = name.split(".")
    return parameter.ndim > 1 and parts[-1] != "head" and parts[-2:] != ["embedding", "weight"]


def orthogonalised(
    x: Tensor, steps: int, coefficients: Sequence[tuple[float, float, float]] = QUINTIC
) -> Tensor:
    """x [M, N] with its singular values brought near 1, by Newton-Schulz steps on the shorter side; the steps
    are in bfloat16 if x is float32."""
    shorter = x.mT if x.shape[0] > x.shape[1] else x
    y = F.normalize(shorter, dim=(-2, -1), eps=1e-15)  # type: ignore[arg-type]
    y = y.to(torch.bfloat16) if x.dtype == torch.float32 else y
    for a, b, c in islice(cycle(coefficients), steps):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        del gram
    y = y.to(x.dtype)
    return y.mT if x.shape[0] > x.shape[1] else y


@dataclass(frozen=True)
class Matrix:
    """A weight that Muon updates.

    Attributes:
        values: the weight's elements on this rank, flat, with a gradient.
        shape: the shape of this rank's part.
        group: the ranks that hold the matrix's parts along ``dim``, which are orthogonalised together; None:
            each rank orthogonalises its own part.
        stacked: whether the first dim counts experts, whose matrices are orthogonalised one by one.
    """

    values: Tensor
    shape: torch.Size
    group: dist.ProcessGroup | None = None
    dim: int = 0
    stacked: bool = False


class Muon(Optimizer):
    """Muon for matrices, and AdamW for other weights, which are updated last.

    Args:
        others: the weights that AdamW updates.
        steps: the number of Newton-Schulz steps.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        others: Sequence[Tensor],
        precision: Precision,
        *,
        steps: int,
        coefficients: Sequence[tuple[float, float, float]] = QUINTIC,
        **settings: Any,
    ):
        super().__init__(others, replace(precision, master=False), **settings)
        self.matrices, self.steps, self.coefficients = matrices, steps, coefficients
        later = not settings["with_moments"]
        #: the moment of each matrix; None before its first update
        self.moments = [None if later else torch.zeros_like(m.values) for m in matrices]

    def gradients(self) -> list[Tensor]:
        """The gradients of all weights, those of the matrices first."""
        of_matrices = [m.values.grad for m in self.matrices if m.values.grad is not None]
        return [*of_matrices, *super().gradients()]

    @torch.no_grad()
    def update(self) -> None:
        rate = self.adam.param_groups[0]["lr"]
        for number, matrix in enumerate(self.matrices):
            values, gradient = matrix.values, matrix.values.grad
            assert gradient is not None
            if (moment := self.moments[number]) is None:
                moment = self.moments[number] = torch.zeros_like(values)
            values.mul_(1 - rate * DECAY)
            moment.lerp_(gradient, 1 - MOMENTUM)
            values.add_(self._update(matrix, moment), alpha=-rate)
        super().update()

    def _update(self, matrix: Matrix, moment: Tensor) -> Tensor:
        x = moment.view(matrix.shape)
        if matrix.group is not None:
            x = all_gather(x, matrix.dim, matrix.group)
        if matrix.stacked:
            update = torch.stack([self._orthogonal(each) for each in x])
        else:
            update = self._orthogonal(x)
        if matrix.group is not None:
            update = update.chunk(matrix.group.size(), matrix.dim)[matrix.group.rank()]
        return update.flatten()

    def _orthogonal(self, x: Tensor) -> Tensor:
        """The update of one matrix, from its moment x [..., N], in x's shape."""
        rows = x.flatten(0, -2)
        update = orthogonalised(rows, self.steps, self.coefficients) * max(rows.shape) ** 0.5 * SCALE
        return update.view(x.shape)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(moment for moment in self.moments if moment is not None)]


#: how far a rank's elements may be above a bucket's mean, as a share of it; and a bucket's least size, as a
#: share of ranks times its largest weight
_SLACK, _FLOOR = 0.3, 0.9


def packed(shapes: Sequence[torch.Size], full_at: int | None, sharding: Sharding) -> list[BucketLayout]:
    """The layouts of the buckets of a buffer of matrices [..., rows, H], where no matrix is cut over ranks.

    Args:
        shapes: the matrices' shapes, in the order of registration.
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
    """The layout of a bucket whose members, the largest first, go to the rank with the least work so far.
    Adds their work to ``loads``, the work of each rank."""
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
    """The cost of a matrix's Newton-Schulz steps, up to a constant factor."""
    longer, shorter = sorted((math.prod(shape[:-1]), shape[-1]), reverse=True)
    return longer * shorter * shorter


def _rounded(elements: int, sharding: Sharding) -> int:
    """The length of a rank's part, from ``elements`` on, with which a bucket's end needs no padding."""
    multiple = math.lcm(64, sharding.padded_end(1) // sharding.ranks)
    return math.ceil(elements / multiple) * multiple


def dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that updates each weight: weights go, the smallest first, to ranks 0, 1, .. and back."""
    owners = [0] * len(sizes)
    turns = [*range(ranks), *reversed(range(ranks))]
    for place, number in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        owners[number] = turns[place % len(turns)]
    return owners


class Dealt:
    """Weights of which each rank of a group updates some.

    Attributes:
        owners: the rank that updates each weight.
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
        """Broadcast each weight from its owner to the other ranks, all weights of an owner in one message."""
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
    """Views of a message in the shapes of the weights."""
    parts = message.split([w.numel() for w in weights])
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=False)]
