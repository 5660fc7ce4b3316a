"""LASP-2H (Sun et al., arXiv 2502.07563): LASP-2 for hybrids of linear and softmax attention.

Every rank holds all weights and a chunk of L/N positions, whatever the layer. Layers of linear attention or
of a gated recurrence gather states, as in LASP-2. Layers of softmax attention gather keys and values, as in
Llama 3's context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.base import Site
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.traffic import Traffic


class Lasp2H(AllGatherKV, Lasp2):
    """Sequence chunks whose states, or keys and values, are gathered, as the layer asks."""

    name = "lasp2h"
    summary = "sequence chunks of hybrids; states are gathered, or keys and values in softmax layers"
    source = "arXiv 2502.07563, LASP-2H"
    meets = AllGatherKV.meets | Lasp2.meets
    marks_work = True

    @classmethod
    def lacking(cls, sites: Iterable[Site]) -> str:
        kinds = {site.kind for site in sites}
        is_hybrid = not any(kinds.isdisjoint(of.meets) for of in (Lasp2, AllGatherKV))
        return super().lacking(sites) if is_hybrid else "lasp2h is for hybrids, which this model is not"

    def check_sizes(self, sites: Sequence[Site]) -> None:
        AllGatherKV.check_sizes(self, sites)
        Lasp2.check_sizes(self, sites)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        sites = list(sites)
        yield from Lasp2.communication(self, sites, element_bytes)
        softmax = [site for site in sites if site.kind in AllGatherKV.meets]
        yield from AllGatherKV.communication(self, softmax, element_bytes)
