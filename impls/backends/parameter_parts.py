"""The parts that torch's ``fully_shard`` cuts parameters into.

A parameter is cut along its first dim, padded to a multiple of N. If that has fewer rows than there are
ranks, it is cut along the first other dim that N divides, if there is one; if there is none, a parameter of
more than two dims is cut along its rows as the matrix that programs have, not padded to N times a few parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def cut_dim(shape: torch.Size, size: int) -> int:
    """The dim that a parameter is cut along."""
    if shape[0] >= size:
        return 0
    return next((dim for dim, n in enumerate(shape) if n % size == 0), 0)


def cut_shape(shape: torch.Size, size: int) -> torch.Size:
    """The shape as which a parameter is cut: its own, or that of a matrix."""
    if len(shape) < 3 or shape[0] >= size or any(n % size == 0 for n in shape):
        return shape
    return torch.Size((math.prod(shape[:-1]), shape[-1]))


def padded_elements(shape: torch.Size, size: int) -> int:
    """Elements of a parameter in messages, padding included."""
    shape = cut_shape(shape, size)
    n = shape[cut_dim(shape, size)]
    return shape.numel() // n * math.ceil(n / size) * size


def held_rows(shape: torch.Size, size: int, rank: int) -> tuple[int, int]:
    """The first of a rank's rows along the dim that a parameter is cut along, and how many it has."""
    shape = cut_shape(shape, size)
    whole = shape[cut_dim(shape, size)]
    each = math.ceil(whole / size)
    first = min(whole, rank * each)
    return first, min(each, whole - first)


def own_part(x: Tensor) -> Tensor:
    """A rank's part of a tensor that is sharded, or is its own."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


#: the shapes of parameters that are cut as matrices, by what has them
Shapes = Mapping[tuple[nn.Module, str], torch.Size]


def made_matrices(module: nn.Module, size_of: Callable[[nn.Parameter], int]) -> Shapes:
    """Give parameters the shape as which they are cut over ``size_of`` ranks; returns what they had."""
    shapes = {}
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and (shape := cut_shape(p.shape, size_of(p))) != p.shape:
                shapes[owner, name] = p.shape
                p.data = p.data.view(shape)
    return shapes


def whole_shapes(unit: nn.Module, shapes: Shapes) -> None:
    """Have what ``fully_shard`` gathers for a unit in the shapes of before :func:`made_matrices`."""
    from torch.distributed.fsdp import fully_shard

    for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
        for p in group.fsdp_params:
            if shape := shapes.get((p._module_info.module, p._module_info.param_name)):
                p._orig_size, p._contiguous_orig_stride = shape, torch.empty(shape, device="meta").stride()
                p.__class__ = _cut_as_matrix()


@cache
def _cut_as_matrix() -> type[Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    class CutAsMatrix(FSDPParam):
        """One whose gradients are summed as a matrix, whatever the shape of what is gathered."""

        def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
            return super()._get_grad_inner_tensor(grad).flatten(0, -2)

    return CutAsMatrix
