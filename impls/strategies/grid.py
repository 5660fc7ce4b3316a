"""Positions on a grid of several dims, as models of videos have them, and the hooks of strategies for grids.

A grid tensor is [B, n1, .., nK, H]. A stage that mixes positions does so along one dim of the grid and needs
that dim whole on every rank; along other dims it acts on each position alone. Grid dims count from 0 for n1.

Shape letters: B batch, H hidden, Z heads, A head size, N ranks in the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from spbench.impls.layout import Site, Unsupported
from spbench.impls.strategies.delegation import left_within, property_left_within


def part_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """(first, count): the positions of part ``index`` of ``size`` positions. Each part has ceil(size / parts)
    positions while there are enough, so the last parts may be short or empty."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(each, size - first)


@dataclass(frozen=True)
class Grid:
    """This rank's part of a tensor on a grid, and the number of the part.

    Attributes:
        x: [B, n1, .., nK, H], along the grid dim ``sharded`` part ``index`` of ``parts`` (:func:`part_of`).
        sizes: n1, .., nK of the whole grid.
        sharded: the grid dim that is cut; None where x is whole.

    Raises:
        ValueError: the shape of x is not the shape of the part.
    """

    x: Tensor
    sizes: tuple[int, ...]
    sharded: int | None = None
    parts: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        held = list(self.sizes)
        if self.sharded is not None:
            held[self.sharded] = part_of(self.sizes[self.sharded], self.parts, self.index)[1]
        if list(self.x.shape[1:-1]) != held:
            raise ValueError(
                f"part {self.index} of {self.parts} of a grid {self.sizes}, sharded along dim {self.sharded}"
                f", is {held} and not {list(self.x.shape[1:-1])}"
            )

    def of(self, x: Tensor) -> Grid:
        """The same part of the grid with another tensor x."""
        return replace(self, x=x)

    def rows(self, table: Tensor, dim: int) -> Tensor:
        """The rows of a table [n, ...], one for each position along the grid dim ``dim``, that x covers."""
        if dim != self.sharded:
            return table
        return table.narrow(0, *part_of(table.shape[0], self.parts, self.index))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_along(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
    """Attention along one grid dim: q, k, v [B, n1, .., nK, Z, A] -> the same shape. ``attend`` gets [B times
    the other dims, Z, n, A]: each line of the grid is a sample of its batch."""
    lines = [x.movedim(dim + 1, -2) for x in (q, k, v)]
    shape = lines[0].shape[:-3]
    y = attend(*(x.flatten(0, -4) for x in lines))
    return y.unflatten(0, shape).movedim(-2, dim + 1)


def grid_of(site: Site) -> tuple[int, ...]:
    """The sizes n0, n1, .. of a site's grid; empty where its positions are a sequence."""
    return tuple(site.dims[f"n{i}"] for i in range(len(site.dims)) if f"n{i}" in site.dims)


def grid_letters(sizes: Sequence[int]) -> dict[str, int]:
    """The entries n0, n1, .. of :attr:`Site.dims` for a grid of these sizes, which :func:`grid_of` reads."""
    return {f"n{i}": size for i, size in enumerate(sizes)}


def as_sequences(sites: Iterable[Site], dim: int) -> Iterator[Site]:
    """Yields the sites, and turns each site on a grid into a site of sequences (B, L) along one dim: the
    other dims join the batch, and sites where positions meet ``along`` another dim are dropped.

    Raises:
        Unsupported: a grid has no such dim.
    """
    for site in sites:
        sizes = grid_of(site)
        if not sizes:
            yield site
        elif not 0 <= dim < len(sizes):
            last = len(sizes) - 1
            raise Unsupported(f"a grid of {len(sizes)} dims has no dim {dim}", f"use grid_dim 0 to {last}")
        elif site.dims.get("along", dim) == dim:
            lines = site.dims["B"] * math.prod(sizes) // sizes[dim]
            yield replace(site, dims={**site.dims, "B": lines, "L": sizes[dim]})


class GridHooks:
    """Which part of a grid has this rank, and how do positions meet along a dim of it?

    The defaults hold for one device, for strategies that split features, and for strategies that cut one dim
    of the grid and communicate along it in :meth:`full_attention`.
    """

    @property_left_within
    def grid_dim(self) -> int:
        """The grid dim along which inputs are cut, where a strategy cuts sequences."""
        return 0

    @left_within
    def grid(self, x: Tensor, sizes: Sequence[int]) -> Grid:
        """This rank's part of an input on a grid of these sizes; :meth:`Strategy.shard` has cut x."""
        return Grid(x, tuple(sizes))

    @left_within
    def plan_grid(self, stages: Sequence[int], sizes: Sequence[int]) -> list[int | None]:
        """The dim along which the grid is cut during each stage of a model, for :meth:`along`; ``stages`` are
        the dims that the stages need whole, one after another."""
        return [None] * len(stages)

    @left_within
    def along(self, grid: Grid, dim: int, planned: int | None) -> Grid:
        """The grid cut along the dim ``planned`` (:meth:`plan_grid`) for a stage that mixes along ``dim``."""
        return grid

    @left_within
    def restored(self, grid: Grid) -> Grid:
        """The grid cut along :attr:`grid_dim` again, as inputs are."""
        return grid

    @left_within
    def grid_attention(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
        """Attention along a grid dim, after :meth:`along`: q, k, v [B, n1, .., nK, Z, A] -> the same shape,
        for the positions and heads of this rank's projections."""
        return attend_along(whole_attention, q, k, v, dim)

    @left_within
    def text_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's positions to a text that every rank has: q [B, n1, .., nK, Z, A], k and v
        [B, W, Z, A] -> the shape of q."""
        y = whole_attention(*(x.flatten(1, -3).transpose(1, 2) for x in (q, k, v)))
        return y.transpose(1, 2).unflatten(1, q.shape[1:-2])

    @left_within
    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax attention where every query sees every key: q, k, v [B, Z, L or a part, A] -> [B, Z, L or a
        part, A]; scores are scaled by A**-0.5 and never stored."""
        return whole_attention(q, k, v)


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of all queries to all keys: q [B, Z, queries, A], k, v [B, Z, keys, A] -> as q."""
    return F.scaled_dot_product_attention(q, k, v)
