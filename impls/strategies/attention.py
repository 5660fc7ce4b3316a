"""Where positions meet: the kinds of attention in a sequence that models ask for, and stages on a grid of
several dims, as models of videos have them; on a single device.

A grid tensor is [B, n1, .., nK, H]. A stage that mixes positions does so along one dim of the grid and needs
that one whole on every rank; along the others it acts on each position alone. Grid dims count from 0 for n1.

Shape letters: B batch, L sequence, H hidden, Z heads, G heads of keys and values, A head size, D size of
queries and keys of linear attention, K Linformer's projected length, N ranks in the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.collectives import ReusedBuffer
from spbench.impls.kernels.dropout import DropoutRandom
from spbench.impls.kernels.dropout_attention import dropout_flash_attention
from spbench.impls.kernels.flash_attention import causal_flash_attention
from spbench.impls.kernels.linear_attention import linear_attention, quadratic_linear_attention
from spbench.impls.kernels.projection import strided_product
from spbench.impls.kernels.softmax import masked_softmax, softmax_of_scores
from spbench.impls.layout import Site, Unsupported
from spbench.impls.strategies.delegation import left_within, property_left_within

#: "chunked" is linear in L by way of the D x A state (the right product); "left_product" multiplies scores
#: and values tile by tile, in L x L time and no memory for scores; "quadratic" makes all scores, with torch's
#: own operators
LINEAR_ATTENTION_WAYS = {
    "chunked": linear_attention,
    "left_product": lambda q, k, v, decay: linear_attention(q, k, v, decay, block=q.shape[2]),
    "quadratic": quadratic_linear_attention,
}


class AttentionHooks:
    """How do positions of a sequence meet? The defaults hold where this rank has all the keys and values that
    its queries attend to, of the heads that its projections made."""

    random: DropoutRandom
    if TYPE_CHECKING:

        @property
        def outermost(self) -> AttentionHooks: ...

    @property_left_within
    def attention_axes(self) -> tuple[str, ...]:
        """The axes over which attention probabilities are spread: along these each rank draws its own
        dropout, along all others they draw the same."""
        return ()

    @left_within
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        """Softmax attention: q, k, v [B, Z, L or a part, A] -> [B, Z, L or a part, A].

        ``mask`` is True where a key must not be attended: [B, 1, 1, L], or [B, 1, queries, L]. Its
        key dim is always whole, its query dim this rank's. ``softmax`` is a way of
        :func:`masked_softmax`.
        """
        return self.local_attention(q, k, v, mask, dropout=dropout, softmax=softmax)

    @left_within
    def local_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        """Softmax attention where this rank already holds all keys that its queries need:
        q [B, Z, queries, A], k, v [B, Z, keys, A] -> [B, Z, queries, A]."""
        scores = torch.matmul(q, k.transpose(-1, -2))
        probabilities = masked_softmax(scores, mask, q.shape[-1] ** -0.5, softmax)
        del scores
        probabilities = self.random.dropout(probabilities, dropout, self.outermost.attention_axes)
        return torch.matmul(probabilities, v)

    @left_within
    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal softmax attention, scores scaled by A**-0.5: q [B, Z, L or a part, A], k, v [B, G, L or a
        part, A] -> [B, Z, L or a part, A]; the heads are those that this rank's projections made. G divides
        Z, and each head of k and v is that of Z/G consecutive ones of q (grouped queries, arXiv 2305.13245).
        """
        return causal_flash_attention(q, k, v)

    @left_within
    def whole_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: float,
        scores: str | None = None,
        into: ReusedBuffer | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Softmax attention of heads whose positions this rank has all, with dropout of probabilities or with
        all scores in memory: q [B, Z, L, A], k, v [B, G, L, A] -> [B, Z, L, A]; see :meth:`causal_attention`.

        Args:
            scores: None: no tensor holds them (causal flash attention); "fused" or "plain": they are made,
                with the softmax of :func:`softmax_of_scores`; k and v then have as many heads as q.
            into: lends the memory that Megatron-LM hands to the product of queries and keys; for scores only.
            mask: for scores only, True where a key must not be attended [B, 1, 1 or L, L]; None: the causal
                mask.
        """
        axes = self.outermost.attention_axes
        if scores is None:
            return dropout_flash_attention(q, k, v, dropout, self.random.next_seed(axes))
        if into is not None:
            # the product does not add to this memory, so its old values are never read
            into.take((*q.shape[:3], k.shape[2]), q)
        products = strided_product(q, k.mT, q.shape[-1] ** -0.5)
        probabilities = softmax_of_scores(products, mask, fused=scores == "fused")
        del products
        return strided_product(self.random.dropout(probabilities, dropout, axes), v)

    @left_within
    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, *, way: str = "chunked"
    ) -> Tensor:
        """Causal linear attention, o_i = sum over j <= i of exp(-s (i - j)) (q_i . k_j) v_j, unscaled:
        q, k [B, Z, L or a part, D], v [B, Z, L or a part, A] -> [B, Z, L or a part, A].

        ``decay`` [Z] holds the rate s of every head of the layer, whichever this rank has; None: no decay.
        ``way`` is a key of LINEAR_ATTENTION_WAYS. q, k and v may be views; they are kept as they are.
        """
        if way not in LINEAR_ATTENTION_WAYS:
            raise ValueError(f"linear attention is {' or '.join(LINEAR_ATTENTION_WAYS)}, not {way!r}")
        return LINEAR_ATTENTION_WAYS[way](q, k, v, decay)

    @left_within
    def project_sequence(self, x: Tensor, weight: Tensor) -> Tensor:
        """Linformer's projection of keys or values: x [B, Z, L or a part, A], weight
        :meth:`sequence_parameter` [K, L or a part] -> the whole [B, Z, K, A] on every rank."""
        return torch.matmul(weight, x)


def part_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """(first, count) of part ``index`` of that many positions. Each part has ceil(size / parts) of them as
    far as they last, so the last parts may be short or empty."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(each, size - first)


@dataclass(frozen=True)
class Grid:
    """This rank's part of a tensor on a grid, and which part that is.

    Attributes:
        x: [B, n1, .., nK, H], along the grid dim ``sharded`` part ``index`` of ``parts`` (:func:`part_of`).
        sizes: n1, .., nK of the whole grid.
        sharded: None where x is whole.

    Raises:
        ValueError: x has not the shape of that part.
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
        """Another tensor on the same part."""
        return replace(self, x=x)

    def rows(self, table: Tensor, dim: int) -> Tensor:
        """The rows that x has of a table [n, ...] with one row for each place along a grid dim."""
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
    """What :func:`grid_of` reads."""
    return {f"n{i}": size for i, size in enumerate(sizes)}


def as_sequences(sites: Iterable[Site], dim: int) -> Iterator[Site]:
    """The sites, where those of grids have become sites of the sequences (B, L) along one dim: the other dims
    are part of the batch, and sites where positions meet ``along`` another dim are left out.

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
        """What this rank holds of an input x on a grid of these sizes, after ``shard``."""
        return Grid(x, tuple(sizes))

    @left_within
    def plan_grid(self, stages: Sequence[int], sizes: Sequence[int]) -> list[int | None]:
        """The dim along which the grid is cut during each stage of a model, for :meth:`along`; ``stages`` are
        the dims that the stages need whole, one after another."""
        return [None] * len(stages)

    @left_within
    def along(self, grid: Grid, dim: int, planned: int | None) -> Grid:
        """The grid laid out as planned for the next stage, which mixes along ``dim``."""
        return grid

    @left_within
    def restored(self, grid: Grid) -> Grid:
        """The grid laid out as inputs are."""
        return grid

    @left_within
    def grid_attention(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
        """Attention along a grid dim, after :meth:`along`: q, k, v [B, n1, .., nK, Z, A], of which this rank
        has what its projections made, -> the same shape."""
        return attend_along(whole_attention, q, k, v, dim)

    @left_within
    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax attention where every query sees every key: q, k, v [B, Z, L or a part, A] -> [B, Z, L or a
        part, A]; scores are scaled by A**-0.5 and never stored."""
        return whole_attention(q, k, v)


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of queries to the keys that are here: q [B, Z, queries, A], k, v [B, Z, keys, A]."""
    return F.scaled_dot_product_attention(q, k, v)
