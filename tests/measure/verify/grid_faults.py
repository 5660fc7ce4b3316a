"""DSP with a planted fault each. None is registered."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.collectives import copy_to_group
from spbench.impls.layout import SequenceDim
from spbench.impls.strategies.dsp import DynamicSequenceParallel
from spbench.impls.strategies.grid import Grid
from spbench.impls.strategies.layers import Linear


class PartsInWrongOrder(DynamicSequenceParallel):
    """What comes back is put together place by place of each rank, not rank by rank."""

    def switch(self, grid: Grid, from_dim: int | None, to_dim: int) -> Grid:
        switched = super().switch(grid, from_dim, to_dim)
        if from_dim is None or from_dim == to_dim or grid.sizes[from_dim] % self.size:
            return switched
        cut = from_dim + 1
        x = switched.x.unflatten(cut, (self.size, -1)).transpose(cut, cut + 1).flatten(cut, cut + 1)
        return switched.of(x)


class PaddingAttendedTo(DynamicSequenceParallel):
    """The places that a message adds are cut off only after attention."""

    def grid_attention(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
        size = q.shape[dim + 1]
        missing = math.ceil(size / self.size) * self.size - size
        at_end = (0, 0) * (q.ndim - 2 - dim) + (0, missing)
        q, k, v = (F.pad(x, at_end) for x in (q, k, v))
        return super().grid_attention(q, k, v, dim).narrow(dim + 1, 0, size)


class PaddingInTheLoss(DynamicSequenceParallel):
    """All ranks are given as many places, the last ones again where there are too few."""

    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        if isinstance(dim, tuple):
            dim = dim[self.grid_dim]
        if dim is None:
            return x
        each = math.ceil(x.shape[dim] / self.size)
        places = torch.arange(self.rank * each, (self.rank + 1) * each).clamp(max=x.shape[dim] - 1)
        return x.index_select(dim, places)

    def grid(self, x: Tensor, sizes: Sequence[int]) -> Grid:
        padded = list(sizes)
        padded[self.grid_dim] = math.ceil(sizes[self.grid_dim] / self.size) * self.size
        return super().grid(x, padded)


class _InputSummed(Linear):
    group = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copy_to_group(x, self.group))


class TextCountedTwice(DynamicSequenceParallel):
    """The gradient of the text is summed by the layer that reads it, as tensor parallelism has to, and again
    with those of all parameters."""

    def linear_in_text(self, in_features: int, out_features: int) -> Linear:
        layer = _InputSummed(in_features, out_features)
        layer.group = self.group
        return layer


class _WeightSummed(Linear):
    group = None

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, copy_to_group(self.weight, self.group))


class WeightCountedNTimes(DynamicSequenceParallel):
    """The gradient of a weight is summed in backward, and the sum again with the others."""

    def linear_out(self, in_features: int, out_features: int) -> Linear:
        layer = _WeightSummed(in_features, out_features, bias=False)
        layer.group = self.group
        return layer


class LinesOfOneRankOnly(DynamicSequenceParallel):
    """Attention along the dim that is cut, among the places of a rank: nothing is switched."""

    def along(self, grid: Grid, dim: int, planned: int | None) -> Grid:
        return grid

    def restored(self, grid: Grid) -> Grid:
        return grid
