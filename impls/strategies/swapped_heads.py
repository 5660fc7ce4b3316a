"""Gated recurrences by Ulysses' swap: all-to-alls give each rank all positions of some heads.

All work between the projections acts on each head alone, so one swap is enough: queries, keys, values and
gates of the projections are swapped; convolutions, gates and recurrence run on whole sequences with this
rank's heads of each weight (A_log, dt_bias, the convolutions'); then the output is swapped back. No halo and
no state is sent. Megatron-LM's context parallelism of Mamba-2 layers works like this (MambaContextParallel).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from spbench.impls.collectives import all_to_all
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.recurrence import Mix
from spbench.impls.traffic import Traffic

#: the dims of positions and of heads in [B, L, Z, A]
POSITIONS, HEADS = 1, 2


class SwappedHeads(Strategy):
    """Swaps chunks of a sequence for heads around the part of a recurrent layer between its projections."""

    @abstractmethod
    def padded(self, heads: int) -> int:
        """The number of heads after padding ``heads`` to a number that the ranks divide."""

    @abstractmethod
    def sent(self, heads: int, kv_heads: int) -> int:
        """The number of heads of queries and keys that are sent for ``heads`` heads of values."""

    def recurrence_traffic(self, site: Site, element_bytes: int) -> Iterator[Traffic]:
        """Yields the all-to-alls of a gated recurrence."""
        d = site.dims
        positions = d["B"] * (d["L"] // self.size) * element_bytes
        keys, values = self.padded(self.sent(d["Z"], d["G"])), self.padded(d["Z"])
        for phase in ["forward", *(["backward"] if site.recomputed else []), "backward"]:
            for purpose, count, features in (
                ("queries and keys of a recurrence", 2, keys * d["D"]),
                ("its values and output", 2, values * d["A"]),
                ("its gates", 1, values * d["gates"]),
            ):
                yield Traffic(phase, purpose, "all_to_all", count * site.count, positions * features)

    def mix_by_heads(self, mix: Mix, by_heads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
        if self.size == 1:
            return super().mix_by_heads(mix, by_heads, weights)
        heads = max(x.shape[HEADS] for x in by_heads)
        swapped = [
            all_to_all(self._for_ranks(x, HEADS, heads), HEADS, POSITIONS, self.group) for x in by_heads
        ]
        by_heads.clear()
        own = [self._for_ranks(w, 0, heads).chunk(self.size)[self.rank] for w in weights]
        y = super().mix_by_heads(mix, swapped, own)
        return all_to_all(y, POSITIONS, HEADS, self.group)[:, :, :heads]

    def _for_ranks(self, x: Tensor, dim: int, heads: int) -> Tensor:
        """x with its heads along ``dim`` repeated, and zeros added, until N divides their number."""
        if x.shape[dim] < heads:
            x = x.repeat_interleave(self.sent(heads, x.shape[dim]) // x.shape[dim], dim)
        added = self.padded(x.shape[dim]) - x.shape[dim]
        return F.pad(x, (*(0, 0) * (x.ndim - dim - 1), 0, added)) if added else x
