"""The layers of tensor parallelism: projections split by columns or rows, an embedding split by rows.

Shape letters: B batch, L sequence, H hidden, F features, V vocabulary, Z heads, G heads of keys and values,
A head size, N ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.collectives import copy_rows_to_group, reduce_from_group
from spbench.impls.kernels.projection import library_of, mark_rows
from spbench.impls.layout import Shard, mark_shard
from spbench.impls.place import Place
from spbench.impls.strategies.layers import GroupedLinear, GroupedQueryLinear, Linear, SeparateLinear


class SplitWeights(Protocol):
    """The strategy that splits the weights of these layers over the ranks of its one axis;
    :class:`TensorParallel` documents the methods."""

    axes: tuple[str, ...]
    place: Place
    size: int
    rank: int
    group: dist.ProcessGroup | None

    def mark(self, parameter: nn.Parameter, dim: int = 0) -> nn.Parameter: ...

    def replicas(self, kv_heads: int) -> int: ...

    def enter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def whole_input(self, x: Tensor) -> Tensor: ...

    def leave(self, x: Tensor) -> Tensor: ...

    def vocabulary_parameter(self, *shape: int) -> nn.Parameter: ...


class ColumnParallelLinear(Linear):
    """x [..., H] -> this rank's columns [..., F/N] of x W^T + b; all-reduces the gradient of x."""

    def __init__(self, in_features: int, out_features: int, tp: SplitWeights):
        super().__init__(in_features, out_features // tp.size)
        tp.mark(self.weight)
        assert self.bias is not None
        tp.mark(self.bias)
        self.tp = tp

    def project(self, x: Tensor) -> Tensor:
        return self.tp.enter(x, self.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.enter(x, self.weight, self.bias)


class ColumnParallelGroupedLinear(GroupedLinear):
    """x [..., H] -> this rank's columns [..., F/N] of each group; all-reduces the gradient of x."""

    def __init__(self, in_features: int, out_features: int, groups: int, tp: SplitWeights, *, bias: bool):
        super().__init__(in_features, out_features // tp.size, groups, bias=bias)
        for parameter in self.parameters():
            tp.mark(parameter, dim=1)
        self.tp = tp

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.gathered_once:
            return super().project(self.tp.whole_input(x), bias)
        return self.tp.enter(x, self.weight, bias)


class ColumnParallelSeparateLinear(SeparateLinear):
    """x [..., H] -> this rank's columns [..., F_g/N] of each projection; one all-reduce of x's gradient."""

    def __init__(
        self, in_features: int, out_features: Sequence[int], tp: SplitWeights, *, bias: bool = False
    ):
        super().__init__(in_features, [n // tp.size for n in out_features], bias=bias)
        for parameter in self.parameters():
            tp.mark(parameter)
        self.tp = tp

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(self.tp.whole_input(x))


@dataclass(frozen=True)
class SharedGroupShard(Shard):
    """This rank's part of a weight [G, (Z/G + 2) A, H] or its bias, where ``replicas`` of the ``parts`` ranks
    share a group. The part has some of the group's queries, and its key and value (``shared`` rows), which
    every rank of the group holds."""

    replicas: int = 1
    shared: int = 0

    def of(self, full: Tensor) -> Tensor:
        """This rank's part of the full weight [1, (Z/N + 2) A, H], or of the bias, as a copy."""
        group, place = divmod(self.index, self.replicas)
        rows = full[group]
        queries = rows[: -self.shared].chunk(self.replicas)[place]
        return torch.cat((queries, rows[-self.shared :])).unsqueeze(0)

    def full_shape(self, local: torch.Size) -> list[int]:
        _, rows, *columns = local
        return [self.parts // self.replicas, (rows - self.shared) * self.replicas + self.shared, *columns]

    def replicated(self, local: torch.Size) -> tuple[int, int]:
        return self.shared * local[2:].numel(), self.replicas


class ColumnParallelGroupedQuery(GroupedQueryLinear):
    """x [..., H] -> this rank's queries [..., G/N, Z/G, A], keys and values [..., G/N, A]; all-reduces the
    gradient of x.

    Where there are more ranks than groups, each rank of a group has some of its queries, [..., 1, Z/N, A],
    and holds the group's key and value, [..., 1, A]; the gradients of these are summed over the group's
    ranks.
    """

    def __init__(
        self,
        in_features: int,
        head_size: int,
        heads: int,
        kv_heads: int,
        tp: SplitWeights,
        *,
        bias: bool = False,
    ):
        (axis,), replicas = tp.axes, tp.replicas(kv_heads)
        super().__init__(in_features, head_size, heads // tp.size, kv_heads * replicas // tp.size, bias=bias)
        self.tp, self.replica_group = tp, tp.place.subgroup(axis, size=replicas)
        whole = Shard(axis, 0, tp.rank, tp.size)
        shared = SharedGroupShard(axis, 0, tp.rank, tp.size, replicas, 2 * head_size)
        for parameter in self.parameters():
            mark_shard(parameter, whole if replicas == 1 else shared)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = self._summed(self.weight)
        assert weight is not None
        return self.separate(self.tp.enter(x, weight, self._summed(self.bias)))

    def _summed(self, parameter: nn.Parameter | None) -> Tensor | None:
        """The parameter as a tensor whose backward sums the gradient of the rows of key and value over the
        ranks that hold these rows."""
        if parameter is None or self.replica_group is None:
            return parameter
        # a rank with replicas has one group, so the rows of its key and value are the last rows
        rows = slice(-2 * self.head_size, None)
        summed = copy_rows_to_group(parameter.flatten(0, 1), rows, self.replica_group)
        if (recipe := getattr(parameter, "spbench_fp8", None)) is not None:
            summed.spbench_fp8 = recipe  # type: ignore[attr-defined]
            mark_rows(summed, library_of(parameter))
        return summed


class RowParallelLinear(Linear):
    """This rank's columns of x [..., F/N] -> x W^T [..., H], summed over ranks."""

    def __init__(self, in_features: int, out_features: int, tp: SplitWeights):
        super().__init__(in_features // tp.size, out_features, bias=False)
        tp.mark(self.weight, dim=1)
        self.tp = tp

    def project(self, x: Tensor) -> Tensor:
        return self.tp.leave(super().project(x))

    forward = project


class VocabParallelEmbedding(nn.Module):
    """Token ids [B, L] -> [B, L, H] from this rank's rows [V/N, H] of the table, summed over ranks."""

    def __init__(self, vocabulary: int, hidden: int, tp: SplitWeights):
        super().__init__()
        self.weight = tp.vocabulary_parameter(vocabulary, hidden)
        self.first = tp.rank * self.weight.shape[0]
        self.group = tp.group

    def forward(self, tokens: Tensor) -> Tensor:
        return reduce_from_group(self.own_rows(tokens), self.group)

    def own_rows(self, tokens: Tensor) -> Tensor:
        """This rank's part [B, L, H] of the sum for ids [B, L]: 0 where another rank has the token's row."""
        rows = self.weight.shape[0]
        elsewhere = (tokens < self.first) | (tokens >= self.first + rows)
        local = (tokens - self.first).masked_fill_(elsewhere, 0)
        return F.embedding(local, self.weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
