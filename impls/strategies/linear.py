"""The linear layer that models use: a projection whose bias can be left to a fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spbench.impls.kernels.projection import project


class Linear(nn.Module):
    """x [..., in_features] -> x W^T + b [..., out_features]."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def project(self, x: Tensor) -> Tensor:
        """x W^T alone."""
        return project(x, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)


class GroupedLinear(nn.Module):
    """x [..., in_features] -> ``groups`` times x W_g^T [..., out_features], as one matrix product.

    The weight is [groups, out_features, in_features], so that a split of its second dim splits each group.
    """

    def __init__(self, in_features: int, out_features: int, groups: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.together(x).unbind(-2)

    def together(self, x: Tensor) -> Tensor:
        """All projections side by side [..., groups, out_features]."""
        return self.project(x).unflatten(-1, self.weight.shape[:2])

    def project(self, x: Tensor) -> Tensor:
        """x times the weights of all groups."""
        return project(x, self.weight)
