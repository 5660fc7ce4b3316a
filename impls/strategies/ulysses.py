"""DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509, section 3).

Every rank holds all weights and a chunk of L/N positions of every sequence. Attention works on each head
alone. So before attention, one all-to-all each for queries, keys and values turns [all Z heads, L/N
positions] into [Z/N heads, all L positions]. Attention is then the single device's, for fewer heads, and a
fourth all-to-all turns its output back. A rank sends 4 (N-1)/N B (L/N) Z A elements forward and as many
backward, which falls with N. (Section 3.2 counts 4 N h / P a link: its N is the length, its P the ranks, its
h our Z A.) The number of heads limits N.

Where keys and values have fewer heads than queries, these heads are sent once if N divides their number, else
each head is repeated, up to the least common multiple with N.

A strategy within this one may split the "whole" sequences again, over ranks along another axis. Ulysses
around Ring Attention is USP (arXiv 2405.07719), where the heads limit only the ranks of Ulysses.

Gated recurrences swap too. All work between their projections acts on each head alone, so one swap is
enough: queries, keys, values and gates of the projections are swapped; convolutions, gates and recurrence run
on whole sequences with this rank's heads of each weight (A_log, dt_bias, the convolutions'); then the output
is swapped back. No halo and no state is sent. Megatron-LM's context parallelism of Mamba-2 layers works like
this (MambaContextParallel).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.collectives import Group, all_to_all, exchanged, exchanged_back, with_gradient
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.permutation import exchanged_pieces
from spbench.impls.layout import HEEDS_ALL, nearest_divisors
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.grid import Attend, as_sequences
from spbench.impls.strategies.recurrence import Mix
from spbench.impls.strategies.sequence_chunks import GridChunks, GridOptions, refuse_masks_of_own_queries
from spbench.impls.traffic import Traffic

#: the dims of heads and of positions in [B, Z, L, A]
HEADS, POSITIONS = 1, 2


@dataclass(frozen=True)
class UlyssesOptions(GridOptions):
    """Options of :class:`Ulysses`. Attention along dims of a grid other than ``grid_dim`` needs no message.

    Attributes:
        pad_heads: where N does not divide the heads, add heads of zeros up to a multiple of N, which are sent
            and computed like the others and then dropped. Ulysses on more ranks than heads, as the LASP paper
            (arXiv 2404.02882) reports it, needs something like this.
        fused_exchange: the all-to-alls of attention permute on the way, in symmetric memory, without copies
            before and after them (:func:`fused_all_to_all`). The ranks must share a node.
    """

    pad_heads: bool = False
    fused_exchange: bool = False


def _repeated(k: Tensor, v: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, G, L/N, A] with each head ``repeats`` times in a row."""
    if repeats == 1:
        return k, v
    return k.repeat_interleave(repeats, HEADS), v.repeat_interleave(repeats, HEADS)


def _without_gaps(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else exchanged_pieces(x)


_exchanged, _exchanged_back = (partial(each, packed=_without_gaps) for each in (exchanged, exchanged_back))


def fused_all_to_all(x: Tensor, split_dim: int, gather_dim: int, group: Group) -> Tensor:
    """:func:`spbench.impls.collectives.all_to_all` without copies before and after it.

    Ulysses permutes a tensor before an all-to-all, so that what each rank gets lies without gaps, and once
    more after it. In symmetric memory, which all ranks of a node map, one kernel reads a rank's pieces where
    they lie and writes them where the other rank needs them (fast-ulysses; flashinfer #3820). Ranks send the
    same bytes, and the two copies are no work of their own
    (:data:`spbench.impls.kernels.permutation.WITHIN_TRANSFERS`). The transfer itself keeps the rate of the
    all-to-all. Real ranks here copy and then call the all-to-all, so their values are the same bit by bit.
    """
    return with_gradient(_exchanged, _exchanged_back, x, split_dim, gather_dim, group)


class Ulysses(GridChunks):
    """Sequence chunks that all-to-alls swap for whole sequences of some heads during attention."""

    name = "ulysses"
    usual = True
    summary = "sequence chunks; all-to-alls swap them for whole sequences of some heads (DeepSpeed-Ulysses)"
    source = "arXiv 2309.14509, section 3; around ring_attention USP, arXiv 2405.07719"
    can_enclose = True
    meets = frozenset(
        {"attention", "causal_attention", "full_attention", "linear_attention", "gated_recurrence"}
    )
    heeds = HEEDS_ALL
    options_type = UlyssesOptions
    options: UlyssesOptions

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        attend = partial(super().causal_attention, attended=attended)
        if sinks is not None:
            attend = partial(attend, sinks=self.of_own_heads(sinks))
        repeats = self.sent(q.shape[HEADS], k.shape[HEADS]) // k.shape[HEADS]
        return self.by_heads(attend, q, *_repeated(k, v, repeats))

    def by_heads(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Swaps positions for heads, calls ``attend`` on whole sequences of this rank's heads, and swaps
        back: q, k, v [B, Z, L/N, A] -> [B, Z, L/N, A]."""
        heads = q.shape[HEADS]
        q, k, v = (self.to_heads(x) for x in (q, k, v))
        return self.to_positions(attend(q, k, v), heads)

    def to_heads(self, x: Tensor) -> Tensor:
        """One all-to-all: x [B, Z, L/N, A] -> this rank's heads of the whole sequence [B, Z/N, L, A]."""
        missing = self.padded(x.shape[HEADS]) - x.shape[HEADS]
        if missing:
            x = F.pad(x, (0, 0, 0, 0, 0, missing))
        if self.options.fused_exchange:
            return fused_all_to_all(x, HEADS, POSITIONS, self.group)
        return all_to_all(x, HEADS, POSITIONS, self.group)

    def to_positions(self, x: Tensor, heads: int) -> Tensor:
        """One all-to-all: x [B, Z/N, L, A] -> this rank's positions of all ``heads`` [B, Z, L/N, A]."""
        exchange = fused_all_to_all if self.options.fused_exchange else all_to_all
        return exchange(x, POSITIONS, HEADS, self.group)[:, :heads]

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.by_heads(super().full_attention, q, k, v)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        heads = q.shape[HEADS]
        q, k, v = (self.to_heads(x) for x in (q, k, v))
        return self.to_positions(super().linear_attention(q, k, v, mask.of_heads(self.of_own_heads)), heads)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        # every rank has the mask of all keys, and it is the same for all heads
        attend = partial(super().attention, mask=mask, dropout=dropout, softmax=softmax)
        return self.by_heads(attend, q, k, v)

    def of_own_heads(self, numbers: Tensor) -> Tensor:
        """The numbers of this rank's heads [Z/N], from those of all heads [Z]."""
        missing = self.padded(len(numbers)) - len(numbers)
        return F.pad(numbers, (0, missing)).chunk(self.size)[self.rank]

    def keys_to_heads(self, k: Tensor, v: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
        """:meth:`to_heads` of keys and values [B, G, L/N, A], with each head sent ``repeats`` times."""
        k, v = _repeated(k, v, repeats)
        return self.to_heads(k), self.to_heads(v)

    def key_gradients(self, d_k: Tensor, d_v: Tensor, heads: int, repeats: int) -> tuple[Tensor, Tensor]:
        """The gradients [B, G, L/N, A] of the inputs of :meth:`keys_to_heads`, sent as ``heads`` heads, from
        the gradients of its outputs; for strategies with a backward of their own."""
        d_k, d_v = self.to_positions(d_k, heads), self.to_positions(d_v, heads)
        if repeats > 1:
            d_k, d_v = (x.unflatten(HEADS, (-1, repeats)).sum(HEADS + 1) for x in (d_k, d_v))
        return d_k, d_v

    def mix_by_heads(self, mix: Mix, by_heads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
        if self.size == 1:
            return super().mix_by_heads(mix, by_heads, weights)
        positions, dim = 1, 2  # of positions and of heads in [B, L, Z, A]
        heads = max(x.shape[dim] for x in by_heads)
        swapped = [all_to_all(self._for_ranks(x, dim, heads), dim, positions, self.group) for x in by_heads]
        by_heads.clear()
        own = [self._for_ranks(w, 0, heads).chunk(self.size)[self.rank] for w in weights]
        y = super().mix_by_heads(mix, swapped, own)
        return all_to_all(y, positions, dim, self.group)[:, :, :heads]

    def _for_ranks(self, x: Tensor, dim: int, heads: int) -> Tensor:
        """x with its heads along ``dim`` repeated, and zeros added, until N divides their number."""
        if x.shape[dim] < heads:
            x = x.repeat_interleave(self.sent(heads, x.shape[dim]) // x.shape[dim], dim)
        added = self.padded(x.shape[dim]) - x.shape[dim]
        return F.pad(x, (*(0, 0) * (x.ndim - dim - 1), 0, added)) if added else x

    # -- sizes, and what is sent -----------------------------------------------------------------------------

    def padded(self, heads: int) -> int:
        """The smallest multiple of N that is at least ``heads``."""
        return math.ceil(heads / self.size) * self.size

    def sent(self, heads: int, kv_heads: int) -> int:
        """The number of heads of keys and values that are sent for ``heads`` heads of queries: ``kv_heads``,
        repeated until every rank gets equally many."""
        # where heads are padded, each head needs its own key, because a group may end within a rank's heads
        return heads if heads % self.size else math.lcm(kv_heads, self.size)

    def inside(self, site: Site) -> Site:
        d = site.dims
        if "Z" not in d:
            return site
        own = {"Z": self.padded(d["Z"]) // self.size}
        if "G" in d:
            own["G"] = self.padded(self.sent(d["Z"], d["G"])) // self.size
        return replace(site, dims={**d, **own})

    def check_sizes(self, sites: Sequence[Site]) -> None:
        refuse_masks_of_own_queries(self.name, sites)
        for site in sites:
            heads = site.dims.get("Z", self.size)
            if heads % self.size and not self.options.pad_heads:
                raise Unsupported(
                    f"{heads} attention heads cannot be split over {self.size} ranks",
                    f"use {nearest_divisors(heads, self.size)}, or the strategy's option pad_heads",
                )

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            if site.kind == "gated_recurrence":
                yield from self.recurrence_traffic(site, element_bytes)
                continue
            if site.kind not in self.meets:
                continue
            d = site.dims
            # q and k may have D features a head, v and the output have A
            head = d["B"] * (d["L"] // self.size) * element_bytes
            both = [("q and k", d["Z"], d.get("D", d["A"])), ("v and the output", d["Z"], d["A"])]
            if "G" in d:
                sent = self.sent(d["Z"], d["G"])
                both = [("q and the output", d["Z"], d["A"]), ("k and v", sent, d["A"])]
            for phase in ["forward", *(["backward"] if site.recomputed else []), "backward"]:
                for purpose, heads, size in both:
                    payload = head * self.padded(heads) * size
                    yield Traffic(phase, purpose, "all_to_all", site.count * 2, payload)

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
