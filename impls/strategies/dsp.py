"""Dynamic sequence parallelism (DSP; Zhao et al., arXiv 2403.10266, section 3).

Every rank holds all weights and a part of every grid of positions, cut along one of its dims. A stage that
mixes along one dim computes independent lines of the grid, which are whole as long as the grid is cut along
another dim. So attention is the single device's. Where the next stage mixes along the cut dim, one all-to-all
switches the cut to another dim: a rank sends (N-1)/N of its M/N elements, where M is the grid's elements. A
layer that mixes along two dims in turn switches twice forward, whatever the number of heads (section 3.3).
With more dims the grid can stay cut along a dim along which several stages do not mix.

N need not divide a dim of n: the first ranks have ceil(n / N) positions each, the last ranks fewer or none.
The ranks pad to ceil(n / N) for the all-to-all only, and cut the padding from the tensors that they receive.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from spbench.impls.collectives import all_gather, all_to_all
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.grid import Grid, grid_of, part_of
from spbench.impls.strategies.sequence_chunks import GridChunks
from spbench.impls.traffic import Traffic


class DynamicSequenceParallel(GridChunks):
    """A grid that is cut along one dim during each stage; before and after all stages along ``grid_dim``."""

    name = "dsp"
    usual = True
    summary = "grids cut along one dim; an all-to-all switches dims where a stage needs that one whole (DSP)"
    source = "arXiv 2403.10266, section 3"
    meets = frozenset({"full_attention"})
    moves_grid = True

    # -- the primitives of section 3.2 ---------------------------------------------------------------------

    def split(self, x: Tensor, dim: int) -> Grid:
        """This rank's part, along a grid dim, of x [B, n1, .., nK, H] that every rank has whole."""
        sizes = tuple(x.shape[1:-1])
        if self.size == 1:
            return Grid(x, sizes)
        part = x.narrow(dim + 1, *part_of(sizes[dim], self.size, self.rank))
        return Grid(part, sizes, dim, self.size, self.rank)

    def gather(self, grid: Grid) -> Tensor:
        """The whole grid [B, n1, .., nK, H], all-gathered on every rank."""
        if grid.sharded is None or self.group is None:
            return grid.x
        dim, size = grid.sharded + 1, grid.sizes[grid.sharded]
        whole = all_gather(_padded(grid.x, dim, -(-size // self.size)), dim, self.group)
        return whole.narrow(dim, 0, size)

    def switch(self, grid: Grid, from_dim: int | None, to_dim: int) -> Grid:
        """The grid cut along ``to_dim``, by one all-to-all from a grid that is cut along ``from_dim``; the
        same grid without a message if both dims are equal.

        Raises:
            ValueError: the grid is not cut along ``from_dim``.
        """
        if from_dim is None or grid.sharded != from_dim:
            raise ValueError(f"the grid is cut along dim {grid.sharded}, not along dim {from_dim}")
        if from_dim == to_dim:
            return grid
        cut, whole = from_dim + 1, to_dim + 1
        each_cut, each_whole = (-(-grid.sizes[dim] // self.size) for dim in (from_dim, to_dim))
        x = _padded(_padded(grid.x, cut, each_cut), whole, each_whole * self.size)
        x = all_to_all(x, whole, cut, self.group)
        x = x.narrow(cut, 0, grid.sizes[from_dim])
        x = x.narrow(whole, 0, part_of(grid.sizes[to_dim], self.size, self.rank)[1])
        return Grid(x, grid.sizes, to_dim, self.size, self.rank)

    # -- the dim that is cut during each stage -------------------------------------------------------------

    def along(self, grid: Grid, dim: int, planned: int | None) -> Grid:
        if self.size == 1:
            return grid
        if planned is None or planned == dim:
            raise ValueError(f"a stage along dim {dim} cannot have the grid cut along dim {planned}")
        return self.switch(grid, grid.sharded, planned)

    def restored(self, grid: Grid) -> Grid:
        return grid if self.size == 1 else self.switch(grid, grid.sharded, self.grid_dim)

    def plan_grid(self, stages: Sequence[int], sizes: Sequence[int]) -> list[int | None]:
        if self.size == 1:
            return super().plan_grid(stages, sizes)
        return [*plan_switches(stages, sizes, self.size, self.grid_dim, self.grid_dim)]

    def own(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, *part_of(x.shape[dim], self.size, self.rank))

    # -- sizes, and what is sent -----------------------------------------------------------------------------

    @property
    def length_multiple(self) -> int:
        return 1  # parts may be uneven

    def outside(self, site: Site) -> Site:
        # a grid is cut along one dim now and along another later, so every dim must be divisible
        for dim, size in enumerate(grid_of(site)):
            if size % self.size:
                raise Unsupported(
                    f"around {self.name} each dim of a grid must be divisible by its {self.size} ranks, and "
                    f"dim {dim} of {size} is not",
                    "use other sizes of the grid, or the strategy alone",
                )
        return super().outside(site)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        # a sequence of one dim cannot be run
        for site in sites:
            if (sizes := grid_of(site)) and "along" in site.dims:
                self.plan_grid([site.dims["along"]], sizes)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        stages = [site for site in sites if "along" in site.dims for _ in range(site.count)]
        if self.size == 1 or not stages:
            return
        sizes = grid_of(stages[0])
        plan = self.plan_grid([site.dims["along"] for site in stages], sizes)
        switches: Counter[tuple[str, int]] = Counter()
        for (before, after), site in zip(
            pairwise([self.grid_dim, *plan, self.grid_dim]), [*stages, None], strict=True
        ):
            if before == after or before is None or after is None:
                continue
            d = stages[0].dims
            elements = d["B"] * d["H"] * switched_elements(sizes, self.size, before, after)
            # a block that runs again in backward switches again; the switch after the last block does not
            again = ["backward"] if site is not None and site.recomputed else []
            switches.update((phase, elements) for phase in ["forward", *again, "backward"])
        for (phase, elements), count in switches.items():
            yield Traffic(phase, "switch of dims", "all_to_all", count, elements * element_bytes)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros added at the end of ``dim``, so that the dim has ``size`` positions."""
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


def plan_switches(
    stages: Sequence[int], sizes: Sequence[int], parts: int, first: int | None = None, last: int | None = None
) -> list[int]:
    """The cheapest sequence of dims along which to cut a grid whose stages need one dim after another whole.

    Dynamic programming over the dim that is cut during each stage; the cost is the elements that the switches
    send.

    Args:
        stages: the dim that each stage needs whole.
        sizes: n1, .., nK of the grid.
        parts: the number of ranks.
        first, last: the dim along which the grid is cut before and after all stages; None: any.

    Returns the dim that is cut during each stage.

    Raises:
        Unsupported: the grid has one dim only, so no other dim can be cut.
    """
    if len(sizes) < 2:
        raise Unsupported(
            "a sequence of one dim cannot be cut along another", "use ulysses or ring_attention"
        )

    def cost(before: int | None, after: int | None) -> int:
        if before is None or after is None or before == after:
            return 0
        return switched_elements(sizes, parts, before, after)

    # by the dim that is cut during a stage, the cheapest plan up to that stage: (cost, dims so far)
    ways: dict[int | None, tuple[int, list[int]]] = {first: (0, [])}
    for needed in stages:
        ways = {
            dim: min((spent + cost(before, dim), [*cut, dim]) for before, (spent, cut) in ways.items())
            for dim in range(len(sizes))
            if dim != needed
        }
    return min((spent + cost(dim, last), cut) for dim, (spent, cut) in ways.items())[1]


def switched_elements(sizes: Sequence[int], parts: int, from_dim: int, to_dim: int) -> int:
    """The number of positions that one rank puts into the all-to-all of a switch, padding included."""
    each_from, each_to = (-(-sizes[dim] // parts) for dim in (from_dim, to_dim))
    others = math.prod(size for dim, size in enumerate(sizes) if dim not in (from_dim, to_dim))
    return others * each_from * each_to * parts
