"""Sequence chunks for attention to positions that an indexer chooses: the context parallelism of DeepSeek
Sparse Attention in prime-rl (its pull request 2293), LoongForge (141) and Megatron-LM (dsa.py, cp_comm_type
"allgather").

Every rank holds all weights and L/N consecutive positions. Queries stay where they are. One all-gather gives
each rank the index keys of all positions, and another the rows of the latent of keys and values with the key
features that all heads share: in DeepSeek-V3.2 128 + 576 numbers a position, where keys and values of 128
heads are 40,960. Each rank scores its L/N queries against all L index keys, chooses the best of the whole
sequence, and attends to these rows. A reduce-scatter sums the ranks' gradients of rows, in the dtype of
activations as Megatron-LM's; index keys have no gradient. The gathered rows are kept for backward.

DeepSeek-V4's rows and index keys stand for blocks of 4 or 128 positions, which a rank makes of its own chunk.
What lies across the chunk's edge comes from the rank before in one message, as LoongForge's boundary window:
the rows of the W - 1 positions that queries attend to besides blocks, and what blocks that overlap take from
the block before.

Positions are consecutive, because the order of the gathered keys then is that of positions, by which a query
sees keys and of equal scores chooses the first. In a zigzag placement the gathered keys would first have to
be sorted. Each rank has the same work, because the operator scores all keys. Kernels that skip the keys after
a query, such as DeepGEMM's, leave early ranks less, which Megatron-LM's pull request 6058 balances.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.collectives import Ring, all_gather, with_gradient
from spbench.impls.kernels.chosen_attention import Choice, Index, Near, attention_to_chosen
from spbench.impls.options import Options
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.traffic import Traffic


def _passed(rows: Tensor, to: int, group: dist.ProcessGroup) -> Tensor:
    """What this rank receives while each rank sends ``rows`` to the rank ``to`` places after it."""
    ring = Ring(group)
    ring.start(rows.contiguous(), to=to)
    return ring.finish()[0]


@dataclass(frozen=True)
class GatheredLatentsOptions(Options):
    """Options of :class:`GatheredLatents`.

    Attributes:
        placement: the placement of positions on ranks; all but "contiguous" are refused, with the reason.
    """

    placement: str = "contiguous"

    words = {"placement": PLACEMENTS}


class GatheredLatents(SequenceChunks):
    """Sequence chunks whose queries attend to chosen rows of the gathered latents of all ranks."""

    name = "gathered_latents"
    summary = "sequence chunks; latents and index keys are all-gathered (DeepSeek Sparse Attention)"
    source = "arXiv 2512.02556; PrimeIntellect-ai/prime-rl, pull request 2293"
    meets = frozenset({"indexed_attention"})
    heeds = {"indexed_attention": frozenset({"documents"})}
    marks_work = True
    usual = True
    options_type = GatheredLatentsOptions
    options: GatheredLatentsOptions

    def check_sizes(self, sites: Sequence[Site]) -> None:
        if self.options.placement != "contiguous":
            raise Unsupported(
                f"an indexer has no {self.options.placement} placement, because it chooses by the order of "
                "the gathered keys, which must be that of positions, and contiguous ranks have even work",
                "use placement contiguous",
            )

        for site in sites:
            length, d = site.dims.get("L", 0) // self.size, site.dims
            if site.kind == "rows_before" and (length < d["W"] - 1 or length % d["m"]):
                lack = f"lack some of the {d['W'] - 1} before a query, or cut a block of {d['m']}"
                multiple = math.lcm(d["m"] * self.size, self.length_multiple)
                enough = f"a multiple of {multiple} positions, at least {(d['W'] - 1) * self.size}"
                raise Unsupported(f"chunks of {length} positions {lack}", f"use {enough}")

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in sites:
            d, phases = site.dims, ["forward", *(["backward"] if site.recomputed else [])]
            if site.kind == "rows_before" and self.size > 1:
                for phase in [*phases, "backward"]:
                    yield Traffic(phase, "rows before", "send", site.count, d["B"] * d["F"] * element_bytes)
            if site.kind not in self.meets or not d["F"]:
                continue
            positions = d["B"] * d["L"] // d.get("m", 1) * element_bytes
            for phase in phases:
                if d["D"]:
                    yield Traffic(phase, "index keys", "all_gather", site.count, positions * d["D"])
                yield Traffic(phase, "latents", "all_gather", site.count, positions * d["F"])
            rows = positions * d["F"]
            yield Traffic("backward", "gradients of latents", "reduce_scatter", site.count, rows)

    def rows_before(self, rows: Tensor) -> Tensor | None:
        if self.group is None or self.size == 1:
            return super().rows_before(rows)
        # a closed ring, so that all ranks are alike: the first one ignores what the last one sends
        to_next, back = (lambda x, group, to=to: _passed(x, to, group) for to in (1, -1))
        return with_gradient(to_next, back, rows, self.group)

    def indexed_attention(
        self, q: Tensor, rows: Tensor | None, index: Index | None, how: Choice, near: Near | None = None
    ) -> Tensor:
        if self.size == 1:
            return super().indexed_attention(q, rows, index, how, near)
        index = index and index._replace(keys=all_gather(index.keys, 1, self.group))
        rows = rows if rows is None else all_gather(rows, 1, self.group)
        return attention_to_chosen(q, rows, index, how, self.rank * q.shape[1], near)

    def attended_pairs(self, attended: Attended, length: int) -> int:
        return super().attended_pairs(attended, length) // self.size
