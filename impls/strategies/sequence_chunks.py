"""What all strategies share that give each rank a chunk of every sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spbench.impls.options import Options
from spbench.impls.strategies.base import (
    SequenceDim,
    Shard,
    Site,
    Strategy,
    Unsupported,
    mark_shard,
    shard_of,
)
from spbench.impls.strategies.grid import Grid


def chunk_of(x: Tensor, dim: int, number: int, parts: int) -> Tensor:
    """Chunk ``number`` of x cut into ``parts`` equal ones along ``dim``, as a view; ``parts`` must divide the
    dim. ``Tensor.chunk`` would make views of the others too, of which there are as many as ranks."""
    length = x.shape[dim] // parts
    return x.narrow(dim, number * length, length)


class SequenceChunks(Strategy):
    """Positions are cut into N chunks; what acts on each position alone needs nothing else.

    The loss is one sum over all positions, so the gradients of parameters are summed over the ranks, not
    averaged. A strategy derived from this says what happens where positions meet.
    """

    axes = ("sp",)

    @property
    def attention_axes(self) -> tuple[str, ...]:
        return self.axes

    @property
    def hidden_axes(self) -> tuple[str, ...]:
        return self.axes

    def check_sizes(self, sites: Sequence[Site]) -> None:
        size = self.size
        for site in sites:
            length = site.dims.get("L", size)
            if length % size:
                below = length - length % size
                lengths = " or ".join(str(n) for n in (below, below + size) if n)
                raise Unsupported(
                    f"sequence length {length} is not divisible by {size} ranks",
                    f"use a sequence length of {lengths}",
                )

    def partial_elements(self, site: Site) -> Mapping[tuple[str, ...], int]:
        return {self.axes: site.dims["elements"]}

    @property
    def sequence_parts(self) -> int:
        return self.size

    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        if isinstance(dim, tuple):
            dim = dim[self.grid_dim]
        return x if dim is None else chunk_of(x, dim, self.rank, self.size)

    def grid(self, x: Tensor, sizes: Sequence[int]) -> Grid:
        if self.size == 1:
            return super().grid(x, sizes)
        return Grid(x, tuple(sizes), self.grid_dim, self.size, self.rank)

    def sequence_parameter(self, *shape: int) -> nn.Parameter:
        *rest, length = shape
        parameter = nn.Parameter(torch.empty(*rest, length // self.size))
        return mark_shard(parameter, Shard(self.axes[0], len(rest), self.rank, self.size))

    def first_token(self, x: Tensor) -> tuple[Tensor, float]:
        return x[:, 0], 1.0 if self.rank == 0 else 0.0

    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        # what a rank has a part of alone, it also has the whole gradient of
        shard = shard_of(parameter)
        return tuple(axis for axis in self.axes if shard is None or shard.axis != axis)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class GridOptions(Options):
    """Which part of a grid a rank has.

    Attributes:
        grid_dim: of a grid, the dim that is cut like a sequence.
    """

    grid_dim: int = 0


class GridChunks(SequenceChunks):
    """Sequence chunks of which an option says along which dim a grid is cut."""

    options_type = GridOptions
    options: GridOptions

    @property
    def grid_dim(self) -> int:
        return self.options.grid_dim


def refuse_masks_of_own_queries(name: str, sites: Sequence[Site]) -> None:
    """Raise :class:`Unsupported` where attention masks have a row a query: each rank builds those of its own
    positions, and a strategy that attends to whole sequences would need all of them."""
    if any(site.dims.get("mask_rows", 1) > 1 for site in sites):
        raise Unsupported(f"{name} has only masks that are the same for all queries", "use mask_shape keys")
