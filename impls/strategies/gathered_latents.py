"""Sequence chunks for attention to positions that an indexer chooses: the context parallelism of DeepSeek
Sparse Attention in prime-rl (its pull request 2293), LoongForge (141) and Megatron-LM (dsa.py, cp_comm_type
"allgather").

Every rank holds all weights and L/N consecutive positions. Queries stay where they are. One all-gather gives
each rank the index keys of all positions, and another the rows of the latent of keys and values with the key
features that all heads share: in DeepSeek-V3.2 128 + 576 numbers a position, where keys and values of 128
heads are 40,960. Each rank scores its L/N queries against all L index keys, chooses the best of the whole
sequence, and attends to these rows. A reduce-scatter sums the ranks' gradients of rows, in the dtype of
activations as Megatron-LM's; index keys have no gradient. The gathered rows are kept for backward.

Positions are consecutive, because the order of the gathered keys then is that of positions, by which a query
sees keys and of equal scores chooses the first. In a zigzag placement the gathered keys would first have to
be sorted. Each rank has the same work, because the operator scores all keys. Kernels that skip the keys after
a query, such as DeepGEMM's, leave early ranks less, which Megatron-LM's pull request 6058 balances.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.collectives import all_gather
from spbench.impls.kernels.chosen_attention import Choice, Index, attention_to_chosen
from spbench.impls.options import Options
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.traffic import Traffic


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

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in sites:
            if site.kind not in self.meets:
                continue
            d, phases = site.dims, ["forward", *(["backward"] if site.recomputed else [])]
            positions = d["B"] * d["L"] * element_bytes
            for phase in phases:
                yield Traffic(phase, "index keys", "all_gather", site.count, positions * d["D"])
                yield Traffic(phase, "latents", "all_gather", site.count, positions * d["F"])
            rows = positions * d["F"]
            yield Traffic("backward", "gradients of latents", "reduce_scatter", site.count, rows)

    def indexed_attention(self, q: Tensor, rows: Tensor, index: Index, how: Choice) -> Tensor:
        if self.size == 1:
            return super().indexed_attention(q, rows, index, how)
        index = index._replace(keys=all_gather(index.keys, 1, self.group))
        rows = all_gather(rows, 1, self.group)
        return attention_to_chosen(q, rows, index, how, self.rank * q.shape[1])

    def attended_pairs(self, attended: Attended, length: int) -> int:
        return super().attended_pairs(attended, length) // self.size
