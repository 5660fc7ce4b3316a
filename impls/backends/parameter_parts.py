"""The parts that torch's ``fully_shard`` cuts parameters into.

A parameter is cut along its first dim, padded to a multiple of N. If that has fewer rows than there are
ranks, it is cut along the first other dim that N divides, if there is one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cut_dim(shape: torch.Size, size: int) -> int:
    """The dim that a parameter is cut along."""
    if shape[0] >= size:
        return 0
    return next((dim for dim, n in enumerate(shape) if n % size == 0), 0)


def padded_elements(shape: torch.Size, size: int) -> int:
    """Elements of a parameter in messages, padding included."""
    n = shape[cut_dim(shape, size)]
    return shape.numel() // n * math.ceil(n / size) * size


def held_rows(shape: torch.Size, size: int, rank: int) -> tuple[int, int]:
    """The first of a rank's rows along the dim that a parameter is cut along, and how many it has."""
    whole = shape[cut_dim(shape, size)]
    each = math.ceil(whole / size)
    first = min(whole, rank * each)
    return first, min(each, whole - first)


def own_part(x: Tensor) -> Tensor:
    """A rank's part of a tensor that is sharded, or is its own."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part
