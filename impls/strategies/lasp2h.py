"""LASP-2H (Sun et al., arXiv 2502.07563): LASP-2 for hybrids of linear and softmax attention.

Every rank holds all weights and a chunk of L/N positions, whatever the layer. Layers of linear attention or
of a gated recurrence gather states, as in LASP-2. Layers of softmax attention gather keys and values, as in
Llama 3's context parallelism.

With contiguous chunks, which recurrences need, the last rank attends to all keys and the first to few. So
programs place positions otherwise in layers of softmax attention: zigzag, with an all-to-all between the two
placements before such a layer and one behind it (Megatron-LM's ``linear_cp_layout`` and
``attention_cp_layout``; pith-train). Here only queries move, and the attention's outputs move back, because
each rank gathers all keys anyway: B L/N Z (D + A) elements a rank, and as many in backward. Programs move the
hidden states, B L/N 2 H elements, which are fewer where heads are larger than H / Z, and more where a rank of
tensor parallelism has only some heads. Zigzag, 1 or 2 of the 2N chunks have their rank already, 2 unless 3
divides N. So a rank sends (N - 1)/N of its rows in the mean over ranks.

Layers with a window keep their queries, because there all ranks have even work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended, Numbers
from spbench.impls.layout import HEEDS_ALL
from spbench.impls.row_collectives import move_rows
from spbench.impls.strategies.all_gather_kv import AllGatherKV, AllGatherKVOptions
from spbench.impls.strategies.base import Site
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.placements import BALANCED, intervals
from spbench.impls.traffic import Traffic

#: the placements that queries may have
QUERY_PLACEMENTS = ("contiguous", "zigzag", *BALANCED)


@dataclass(frozen=True)
class Lasp2HOptions(AllGatherKVOptions):
    """Options of :class:`Lasp2H`.

    Attributes:
        query_placement: the placement of queries in softmax attention without a window. With another one than
            "contiguous" an all-to-all moves queries to their ranks, and one moves the outputs back.
    """

    query_placement: str = "contiguous"

    words = {**AllGatherKVOptions.words, "query_placement": QUERY_PLACEMENTS}

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """See :meth:`Options.searched`."""
        yield {"query_placement": "by_work" if "documents" in heeded else "zigzag"}
        yield {}


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of the rows of contiguous chunks to a placement, for one rank.

    Attributes:
        order: this rank's rows in the order of the ranks that get them.
        sent, received: the number of rows for and from each rank.
    """

    order: Numbers
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=32)
    def of(placement: str, rank: int, size: int, length: int, packed: Attended) -> Exchange:
        """The exchange of the ranks' ``length`` rows each. A rank gets its rows in the order of positions."""
        held = intervals(placement, size, length, packed)
        chunk = np.arange(rank * length, (rank + 1) * length)
        owners = np.empty(size * length, np.int64)
        for owner, runs in enumerate(held):
            for start, end in runs:
                owners[start:end] = owner
        mine = owners[chunk]
        sources = np.flatnonzero(owners == rank) // length
        counts = (np.bincount(ranks, minlength=size).tolist() for ranks in (mine, sources))
        return Exchange(np.argsort(mine, kind="stable"), *map(tuple, counts))

    def there(self, x: Tensor, group: Any) -> Tensor:
        """The rows [L/N, ...] of this rank under the placement, from the rows x [L/N, ...] of its chunk."""
        ordered = x[torch.from_numpy(self.order).to(x.device)]
        return move_rows(ordered, self.sent, self.received, group)

    def back(self, x: Tensor, group: Any) -> Tensor:
        """The inverse of :meth:`there`."""
        back = torch.from_numpy(np.argsort(self.order)).to(x.device)
        return move_rows(x, self.received, self.sent, group)[back]


class Lasp2H(AllGatherKV, Lasp2):
    """Sequence chunks whose states (linear layers) or keys and values (softmax layers) are all-gathered."""

    name = "lasp2h"
    summary = "sequence chunks of hybrids; states are gathered, or keys and values in softmax layers"
    source = "arXiv 2502.07563, LASP-2H"
    meets = AllGatherKV.meets | Lasp2.meets
    marks_work = True
    heeds = HEEDS_ALL
    options_type = Lasp2HOptions
    options: Lasp2HOptions

    @classmethod
    def lacking(cls, sites: Iterable[Site]) -> str:
        kinds = {site.kind for site in sites}
        is_hybrid = not any(kinds.isdisjoint(of.meets) for of in (Lasp2, AllGatherKV))
        return super().lacking(sites) if is_hybrid else "lasp2h is for hybrids, which this model is not"

    @property
    def _moves_queries(self) -> bool:
        return self.options.query_placement != "contiguous" and self.size > 1

    @property
    def length_multiple(self) -> int:
        zigzag = self.options.query_placement in ("zigzag", "zigzag_by_document")
        return super().length_multiple * (2 if zigzag and self.size > 1 else 1)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        AllGatherKV.check_sizes(self, sites)
        Lasp2.check_sizes(self, sites)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        sites = list(sites)
        yield from Lasp2.communication(self, sites, element_bytes)
        softmax = [site for site in sites if site.kind in AllGatherKV.meets]
        yield from AllGatherKV.communication(self, softmax, element_bytes)
        for site in softmax if self._moves_queries else []:
            if site.kind == "causal_attention" and "window" not in site.dims:
                yield from self._exchange_traffic(site, element_bytes)

    def _exchange_traffic(self, site: Site, element_bytes: int) -> Iterator[Traffic]:
        d = site.dims
        rows = d["B"] * (d["L"] // self.size) * d["Z"] * element_bytes
        for phase in ["forward", *(["backward"] if site.recomputed else []), "backward"]:
            for purpose, features in (("queries", d.get("D", d["A"])), ("outputs of queries", d["A"])):
                yield Traffic(phase, purpose, "all_to_all", site.count, rows * features)

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        if not self._moves_queries or attended.window is not None:
            return super().causal_attention(q, k, v, attended, sinks)
        placement = self.options.query_placement
        meetings = replace(self.meetings(q, placement, attended), keys="contiguous")
        moved = Exchange.of(placement, self.rank, self.size, meetings.length, meetings.placed_by)
        # positions outermost, as the rows of an all-to-all are
        q = moved.there(q.permute(2, 0, 1, 3), self.group).permute(1, 2, 0, 3)
        o = self.attend(q, k, v, meetings, *([] if sinks is None else [sinks]))
        return moved.back(o.permute(2, 0, 1, 3), self.group).permute(1, 2, 0, 3)

    def attended_pairs(self, attended: Attended, length: int) -> int:
        if not self._moves_queries or attended.window is not None:
            return super().attended_pairs(attended, length)
        held = intervals(self.options.query_placement, self.size, length // self.size, attended)
        return int(attended.pairs(held[self.rank]).sum())
