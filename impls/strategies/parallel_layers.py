"""The layers of tensor parallelism: projections split by columns or rows, an embedding split by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.collectives import reduce_from_group
from spbench.impls.strategies.layers import GroupedLinear, Linear, SeparateLinear

if TYPE_CHECKING:
    from spbench.impls.strategies.tensor_parallel import TensorParallel


class ColumnParallelLinear(Linear):
    """x [..., H] -> this rank's columns [..., F/N]; all-reduces the gradient of x."""

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel):
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

    def __init__(self, in_features: int, out_features: int, groups: int, tp: TensorParallel, *, bias: bool):
        super().__init__(in_features, out_features // tp.size, groups, bias=bias)
        for parameter in self.parameters():
            tp.mark(parameter, dim=1)
        self.tp = tp

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.gathered_once:
            return super().project(self.tp.whole_input(x), bias)
        return self.tp.enter(x, self.weight, bias)


class ColumnParallelSeparateLinear(SeparateLinear):
    """x [..., H] -> this rank's columns [..., F_g/N] of each projection; sums the gradient of x once."""

    def __init__(
        self, in_features: int, out_features: Sequence[int], tp: TensorParallel, *, bias: bool = False
    ):
        super().__init__(in_features, [n // tp.size for n in out_features], bias=bias)
        for parameter in self.parameters():
            tp.mark(parameter)
        self.tp = tp

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(self.tp.whole_input(x))


class RowParallelLinear(Linear):
    """This rank's columns of x [..., F/N] -> [..., H], summed over ranks."""

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel):
        super().__init__(in_features // tp.size, out_features, bias=False)
        tp.mark(self.weight, dim=1)
        self.tp = tp

    def project(self, x: Tensor) -> Tensor:
        return self.tp.leave(super().project(x))

    forward = project


class VocabParallelEmbedding(nn.Module):
    """Token ids [B, L] -> [B, L, H] from this rank's rows [V/N, H] of the table, summed over ranks."""

    def __init__(self, vocabulary: int, hidden: int, tp: TensorParallel):
        super().__init__()
        self.weight = tp.vocabulary_parameter(vocabulary, hidden)
        self.first = tp.rank * self.weight.shape[0]
        self.group = tp.group

    def forward(self, tokens: Tensor) -> Tensor:
        return reduce_from_group(self.own_rows(tokens), self.group)

    def own_rows(self, tokens: Tensor) -> Tensor:
        """This rank's part of the sum: zero where a token is another rank's."""
        rows = self.weight.shape[0]
        elsewhere = (tokens < self.first) | (tokens >= self.first + rows)
        local = (tokens - self.first).masked_fill_(elsewhere, 0)
        return F.embedding(local, self.weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
