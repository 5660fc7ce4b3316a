"""Where the positions of a sequence lie on ranks whose queries meet the keys of all ranks.

Under a causal mask, where queries see no later key, the placement of positions decides how even work is:
- "contiguous", chunk r of N: rank r has r + 1 blocks to attend to, so the last rank works all the time;
- "striped", positions r, r + N, r + 2N, ...: about half of every block, for every rank (Striped Attention,
  arXiv 2311.09431);
- "zigzag", chunks r and 2N-1-r of 2N: half of every block of others, exactly (The Llama 3 Herd of Models,
  arXiv 2407.21783, section 3.3.2; Megatron-LM's context parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.sequence_chunks import GridChunks, GridOptions, chunk_of

PLACEMENTS = ("contiguous", "striped", "zigzag")
ALL = slice(None)


def meeting(placement: str | None, rank: int, owner: int, length: int) -> tuple[slice, slice, bool] | None:
    """Which of a rank's ``length`` queries see which of an owner's ``length`` keys: (queries, keys, causal).
    All of these queries see all of these keys or, if causal, query i of these sees keys j <= i of these.
    None: no query sees any. ``placement`` None: there is no mask.

    All owners of lower rank are met alike, and all of higher rank.
    """
    if placement is None:
        return ALL, ALL, False
    if owner == rank:
        return ALL, ALL, True
    if placement == "contiguous":
        return (ALL, ALL, False) if owner < rank else None
    if placement == "striped":
        if owner < rank:
            return ALL, ALL, True
        # place i of an owner to the right comes after place i of the rank's, so i sees the places before i
        return (slice(1, None), slice(-1), True) if length > 1 else None
    half = length // 2
    # the owner's first chunk lies before both of the rank's, or both of the owner's between the rank's two
    return (ALL, slice(half), False) if owner < rank else (slice(half, None), ALL, False)


@dataclass(frozen=True)
class PlacementOptions(GridOptions):
    """Which positions of a sequence, and which part of a grid, a rank has; attention along other dims of a
    grid than ``grid_dim`` needs no message.

    Attributes:
        placement: of positions on ranks, one of PLACEMENTS; linear attention, recurrences and grids take
            contiguous chunks only.
    """

    placement: str = "contiguous"

    @classmethod
    def searched(cls) -> Iterator[Mapping[str, Any]]:
        """See :meth:`Options.searched`; without a causal mask the placement changes nothing."""
        for placement in ("zigzag", "contiguous", "striped"):
            yield {"placement": placement}

    def __post_init__(self) -> None:
        check_choices(self, {"placement": PLACEMENTS})


class PlacedChunks(GridChunks):
    """Sequence chunks of a placement, whose softmax attention to the keys of all ranks a derived class makes
    in :meth:`attend`."""

    options_type = PlacementOptions
    options: PlacementOptions

    def attend(self, q: Tensor, k: Tensor, v: Tensor, placement: str | None) -> Tensor:
        """Softmax attention of this rank's queries to the keys of all ranks, of which there are two or more:
        q, k, v [B, Z, L/N, A] -> [B, Z, L/N, A], scores scaled by A**-0.5; causal by the positions that
        ``placement`` gives to each rank, or without a mask where that is None."""
        raise NotImplementedError

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        # With a causal mask the ranks' programs differ, but all send the same, and none attends to more keys
        # than the last rank. So all ranks are one set, and the last rank stands for it.
        return [[size - 1, *range(size - 1)]]

    @property
    def length_multiple(self) -> int:
        chunks = 2 * self.size if self.options.placement == "zigzag" and self.size > 1 else 1
        return math.lcm(super().length_multiple, chunks)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        placement = self.options.placement
        for site in sites:
            if site.kind == "attention" and "mask_rows" in site.dims:
                raise Unsupported(f"{self.name} has no masks but the causal one", "use ring_self_attention")
            what = {"linear_attention": "linear attention", "gated_recurrence": "a recurrence"}.get(site.kind)
            if (what or site.kind == "full_attention") and placement != "contiguous":
                what = what or "a grid"
                raise Unsupported(f"{what} has no {placement} placement", "use placement contiguous")

    def own(self, x: Tensor, dim: int) -> Tensor:
        if self.options.placement == "contiguous":
            return super().own(x, dim)
        if self.options.placement == "striped":
            return x.unflatten(dim, (-1, self.size)).select(dim + 1, self.rank)
        places, parts = (self.rank, 2 * self.size - 1 - self.rank), 2 * self.size
        return torch.cat([chunk_of(x, dim, place, parts) for place in places], dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        if self.size == 1:
            return super().attention(q, k, v, mask, dropout=dropout, softmax=softmax)
        if mask is not None or dropout:
            raise Unsupported(f"{self.name} has no masks and no dropout of attention", "use ulysses")
        return self.attend(q, k, v, None)

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.size == 1:
            return super().causal_attention(q, k, v)
        return self.attend(q, k, v, self.options.placement)

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.size == 1:
            return super().full_attention(q, k, v)
        return self.attend(q, k, v, None)
