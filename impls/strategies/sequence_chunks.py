"""The base classes of strategies that give each rank a chunk of every sequence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spbench.impls.attended import Attended
from spbench.impls.kernels.packed_linear_attention import Chunk
from spbench.impls.options import Options
from spbench.impls.strategies.base import (
    SequenceDim,
    Shard,
    Site,
    Strategy,
    Unsupported,
    mark_shard,
    union,
)
from spbench.impls.strategies.grid import Grid, attend_along, grid_of
from spbench.impls.strategies.planning import ParameterKind


def chunk_of(x: Tensor, dim: int, number: int, parts: int) -> Tensor:
    """Chunk ``number`` of x, cut into ``parts`` equal chunks along ``dim``, as a view; ``parts`` must divide
    the dim. ``Tensor.chunk`` would create a view of every chunk, as many as there are ranks."""
    length = x.shape[dim] // parts
    return x.narrow(dim, number * length, length)


class SequenceChunks(Strategy):
    """Positions are cut into N chunks; layers that act on each position alone need no message.

    The loss is one sum over all positions, so gradients of parameters are summed over the ranks, not
    averaged. A derived strategy says what happens where positions meet.
    """

    axes: tuple[str, ...] = ("sp",)

    @property
    def attention_axes(self) -> tuple[str, ...]:
        return union(self.axes, super().attention_axes)

    @property
    def position_axes(self) -> tuple[str, ...]:
        return union(self.axes, super().position_axes)

    @property
    def sequence_parts(self) -> int:
        return super().sequence_parts * self.size

    @property
    def sequence_part(self) -> int:
        # this strategy cuts each part that the strategy within has made
        return super().sequence_part * self.size + self.rank

    @property
    def length_multiple(self) -> int:
        return math.lcm(super().length_multiple, self.sequence_parts)

    def outside(self, site: Site) -> Site:
        site = super().outside(site)
        letter = f"n{self.grid_dim}" if grid_of(site) else "L"
        if letter not in site.dims:
            return site
        return replace(site, dims={**site.dims, letter: site.dims[letter] // self.size})

    def split_over(self, kind: ParameterKind) -> tuple[str, ...]:
        others = super().split_over(kind)
        return union(self.axes, others) if kind == "sequence" else others

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of x, whose positions lie along ``dim``."""
        return chunk_of(x, dim, self.rank, self.size)

    def chunk(self, attended: Attended, length: int) -> Chunk | None:
        """The documents in this rank's chunk of ``length`` positions; None: there is only one."""
        if not attended.documents:
            return None
        return Chunk.of(attended, (self.rank * length, (self.rank + 1) * length))

    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        x = super().shard(x, dim)
        along = dim[self.grid_dim] if isinstance(dim, tuple) else dim
        return x if along is None else self.own(x, along)

    def block_part(self, x: Tensor, dim: int) -> Tensor:
        return self.own(super().block_part(x, dim), dim)

    def grid(self, x: Tensor, sizes: Sequence[int]) -> Grid:
        if self.size == 1:
            return super().grid(x, sizes)
        return Grid(x, tuple(sizes), self.grid_dim, self.sequence_parts, self.sequence_part)

    def sequence_parameter(self, *shape: int) -> nn.Parameter:
        *rest, length = shape
        parameter = nn.Parameter(torch.empty(*rest, length // self.size))
        return mark_shard(parameter, Shard(self.axes[0], len(rest), self.rank, self.size))

    def first_token(self, x: Tensor) -> tuple[Tensor, float]:
        first, share = super().first_token(x)
        return first, share if self.rank == 0 else 0.0


@dataclass(frozen=True)
class GridOptions(Options):
    """Options of :class:`GridChunks`.

    Attributes:
        grid_dim: the dim of a grid that is cut like a sequence.
    """

    grid_dim: int = 0


class GridChunks(SequenceChunks):
    """Sequence chunks, and grids that are cut along the dim of the option ``grid_dim``."""

    options_type = GridOptions
    options: GridOptions

    @property
    def grid_dim(self) -> int:
        return self.options.grid_dim

    def grid_attention(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
        if dim != self.grid_dim:  # this dim is whole on each rank of this strategy
            return super().grid_attention(q, k, v, dim)
        return attend_along(self.full_attention, q, k, v, dim)

    def _check_own(self, sites: Sequence[Site]) -> None:
        super()._check_own(sites)
        if self.within is not None and self.within.moves_grid:
            raise Unsupported(
                f"{self.name} needs a grid that stays cut along one dim; {self.within.name} moves the cut",
                "use tensor_parallel around it",
            )


def refuse_masks_of_own_queries(name: str, sites: Sequence[Site]) -> None:
    """Raise :class:`Unsupported` where attention masks have one row a query: each rank builds the rows of its
    own positions, and a strategy that attends to whole sequences needs all rows."""
    if any(site.dims.get("mask_rows", 1) > 1 for site in sites):
        raise Unsupported(f"{name} has only masks that are the same for all queries", "use mask_shape keys")
