"""yunchang (https://github.com/feifeibear/long-context-attention): rings, Ulysses, and the two together, USP
(arXiv 2405.07719)."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from spbench.impls.layout import Site, Unsupported, nearest_divisors
from spbench.impls.peers.peer import Peer, RingPeer, UlyssesPeer, imported
from spbench.impls.place import Place
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.nesting import Nesting
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.sequence_chunks import chunk_of
from spbench.impls.strategies.ulysses import Ulysses
from spbench.impls.traffic import Traffic

SOURCE = "github.com/feifeibear/long-context-attention"


class YunchangRing(RingPeer):
    """yunchang's copies of the three rings of ring-flash-attention."""

    name = "yunchang_ring"
    summary = "Ring Attention by the package yunchang"
    source = SOURCE
    requires = ("yunchang",)
    functions = {
        "contiguous": "yunchang.ring.ring_flash_attn:ring_flash_attn_func",
        "zigzag": "yunchang.ring.zigzag_ring_flash_attn:zigzag_ring_flash_attn_func",
        "striped": "yunchang.ring.stripe_flash_attn:stripe_flash_attn_func",
    }


class YunchangUlysses(UlyssesPeer):
    """Ulysses by yunchang's layer UlyssesAttention."""

    name = "yunchang_ulysses"
    summary = "Ulysses by the package yunchang"
    source = SOURCE
    requires = ("yunchang",)

    def load(self) -> None:
        self._layer = imported("yunchang.ulysses.attn_layer:UlyssesAttention")(self.group)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        o: Tensor = self._layer(q, k, v, causal=causal)
        return o


class YunchangUSP(Peer, PlacedChunks):
    """yunchang's LongContextAttention: Ulysses over sp around a ring over cp, like ulysses+ring_attention."""

    name = "yunchang_usp"
    summary = "USP, Ulysses around a ring, by the package yunchang"
    source = f"{SOURCE}; arXiv 2405.07719"
    requires = ("yunchang",)
    axes = ("sp", "cp")
    meets = frozenset({"attention", "causal_attention", "full_attention"})
    #: yunchang's names of the rings
    rings = {"contiguous": "basic", "zigzag": "zigzag", "striped": "strip"}

    def load(self) -> None:
        groups = imported("yunchang.globals:PROCESS_GROUP")  # a layer takes its groups from this object
        assert self.place.mesh is not None
        groups.ULYSSES_PG, groups.RING_PG = (self.place.mesh.get_group(axis) for axis in self.axes)
        layer = imported("yunchang.hybrid.attn_layer:LongContextAttention")
        self._layers = {placement: layer(ring_impl_type=ring) for placement, ring in self.rings.items()}

    def own(self, x: Tensor, dim: int) -> Tensor:
        ulysses, ring = self.axes
        along = Place({"sp": self.place.size(ring)}, {"sp": self.place.rank(ring)})
        part = RingAttention(along, self.options).own(x, dim)
        return chunk_of(part, dim, self.place.rank(ulysses), self.place.size(ulysses))

    def check_sizes(self, sites: Sequence[Site]) -> None:
        super().check_sizes(sites)
        ranks = self.place.size(self.axes[0])
        for heads in (site.dims[letter] for site in sites for letter in "ZG" if letter in site.dims):
            if heads % ranks:
                raise Unsupported(
                    f"{heads} attention heads cannot be split over {ranks} ranks along {self.axes[0]}",
                    f"use {nearest_divisors(heads, ranks)}",
                )

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        both = Nesting((Ulysses, RingAttention))
        sizes = {axis: self.place.size(axis) for axis in self.axes}
        yield from both.configured(Place(sizes)).traffic(sites, element_bytes)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        placement = meetings.placement
        by_position = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        o: Tensor = self._layers[placement or "contiguous"](*by_position, causal=placement is not None)
        return o.transpose(1, 2)
