"""The fused projection of grouped-query attention (Ainslie et al., arXiv 2305.13245), on one rank or several.

The heads of keys and values are fewer than those of queries; each serves a group of Z/G queries. The weights
lie group by group, the queries of a group, its key and its value, as in Megatron-LM (mixed_qkv of its
attention), so that a cut between groups cuts all three.

Shape letters: H hidden, Z heads, G heads of keys and values, A head size, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spbench.impls.collectives import copy_rows_to_group
from spbench.impls.kernels.projection import library_of, mark_rows, project
from spbench.impls.layout import Shard, mark_shard

if TYPE_CHECKING:
    from spbench.impls.strategies.tensor_parallel import TensorParallel


class GroupedQueryLinear(nn.Module):
    """x [..., H] -> queries [..., G, Z/G, A], keys and values [..., G, A], as one matmul.

    The weight is [G, (Z/G + 2) A, H], the bias, if there is one, [G, (Z/G + 2) A].
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, head_size: int, heads: int, kv_heads: int, *, bias: bool = False):
        super().__init__()
        self.head_size = head_size
        rows = kv_heads, (heads // kv_heads + 2) * head_size
        self.weight = nn.Parameter(torch.empty(*rows, in_features))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.separate(project(x, self.weight, self.bias))

    def separate(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, from all of them side by side [..., (Z + 2 G) A]."""
        groups = y.unflatten(-1, (self.weight.shape[0], -1, self.head_size))
        q, k, v = groups.split([groups.shape[-2] - 2, 1, 1], -2)
        return q, k.squeeze(-2), v.squeeze(-2)


@dataclass(frozen=True)
class SharedGroupShard(Shard):
    """This rank's part of a weight [G, (Z/G + 2) A, H] or its bias, where ``replicas`` of the ``parts`` ranks
    share a group. The part has some of the group's queries, and its key and value (``shared`` rows), which
    every rank of the group holds."""

    replicas: int = 1
    shared: int = 0

    def of(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor, [1, (Z/N + 2) A, H] or without H (a copy)."""
        group, place = divmod(self.index, self.replicas)
        rows = full[group]
        queries = rows[: -self.shared].chunk(self.replicas)[place]
        return torch.cat((queries, rows[-self.shared :])).unsqueeze(0)

    def full_shape(self, local: torch.Size) -> list[int]:
        _, rows, *columns = local
        return [self.parts // self.replicas, (rows - self.shared) * self.replicas + self.shared, *columns]


class ColumnParallelGroupedQuery(GroupedQueryLinear):
    """x [..., H] -> this rank's queries [..., G/N, Z/G, A], keys and values [..., G/N, A]; all-reduces the
    gradient of x.

    Where there are more ranks than groups, the ranks of a group share out its queries, [..., 1, Z/N, A], and
    each holds its key and value, [..., 1, A], whose gradients they sum.
    """

    def __init__(
        self,
        in_features: int,
        head_size: int,
        heads: int,
        kv_heads: int,
        tp: TensorParallel,
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
        """The parameter, with a hook that sums the gradient of its key's and value's rows over the ranks that
        hold them."""
        if parameter is None or self.replica_group is None:
            return parameter
        # where there are replicas there is one group, so that the rows of its key and value are the last ones
        rows = slice(-2 * self.head_size, None)
        summed = copy_rows_to_group(parameter.flatten(0, 1), rows, self.replica_group)
        if (recipe := getattr(parameter, "spbench_fp8", None)) is not None:
            summed.spbench_fp8 = recipe  # type: ignore[attr-defined]
            mark_rows(summed, library_of(parameter))
        return summed
