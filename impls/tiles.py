"""Sequence tiles: how many positions are computed at once, and the messages that strategies then send.

An operation on each position alone can be computed for one tile of positions after another, so that only one
tile's intermediate results exist (ALST, Bekman et al., arXiv 2506.13996). The number of tiles follows from
the positions that a rank has and from options. A strategy gives each rank equally many positions, so all
ranks have equally many tiles, and thus collectives.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from spbench.impls.layout import Site
from spbench.impls.traffic import Traffic

#: the entries of :attr:`Site.dims` that describe the tiles of a site
_TILE, _SHARE, _AT_ONCE = "tile", "tile_share", "backward_at_once"


@dataclass(frozen=True)
class Tiling:
    """The lengths of tiles, in tokens. At most one of ``longest`` and ``share`` is not 0; if both are 0,
    there is one tile.

    Attributes:
        longest: tokens of the longest tile. There are as few tiles as this allows, all of the same length
            except the last, which may be shorter: ``torch.chunk`` with ALST's number of chunks.
        share: a tile has 1 / ``share`` of the tokens, rounded up to a power of two, as in Liger's fused
            linear cross entropy (liger_kernel/ops/fused_linear_cross_entropy.py), where ``share`` is
            vocabulary / hidden, rounded up.
        backward_at_once: the gradient of a tile is computed right after its forward, and not in backward,
            which would run the forward again.
        precise: gradients of weights are summed over tiles in at least float32, and rounded once.
    """

    longest: int = 0
    share: int = 0
    backward_at_once: bool = False
    precise: bool = False

    def lengths(self, tokens: int) -> list[int]:
        """The lengths of the tiles, one after another, for a rank with ``tokens`` tokens."""
        length = tokens
        if self.longest:
            length = -(-tokens // -(-tokens // self.longest))
        elif self.share:
            length = 1 << (-(-tokens // self.share) - 1).bit_length()
        return [min(length, tokens - first) for first in range(0, tokens, max(length, 1))]

    def __bool__(self) -> bool:
        return bool(self.longest or self.share)

    @cached_property
    def dims(self) -> dict[str, int]:
        """The entries of :attr:`Site.dims` for a site that is computed in these tiles."""
        dims = {_TILE: self.longest, _SHARE: self.share}
        return {k: v for k, v in dims.items() if v} | ({_AT_ONCE: 1} if self.backward_at_once else {})


def tiling_of(site: Site) -> Tiling:
    """The tiling of a site, from its dims."""
    d = site.dims
    return Tiling(d.get(_TILE, 0), d.get(_SHARE, 0), bool(d.get(_AT_ONCE)))


def tiles_of(site: Site, tiling: Tiling, parts: int) -> Iterator[Site]:
    """Yields, for each length of tiles, a site without tiles whose sequence is one tile of each rank.

    Args:
        parts: the number of parts of every sequence, one for each rank.
    """
    lengths = tiling.lengths(site.dims["B"] * site.dims["L"] // parts)
    for length in sorted({*lengths}, reverse=True):
        dims = {k: v for k, v in site.dims.items() if k not in (_TILE, _SHARE, _AT_ONCE)}
        count = site.count * lengths.count(length)
        yield Site(site.kind, count, {**dims, "B": 1, "L": length * parts})


def entries_of_tiles(entries: Iterable[Traffic], site: Site, tiling: Tiling) -> Iterator[Traffic]:
    """Yields the messages of a site's tiles, from ``entries`` in which nothing runs twice: the messages of
    forward are sent again when backward computes a tile again, and once more if the layer is recomputed; with
    ``backward_at_once`` the messages of backward are sent in forward instead."""
    for entry in entries:
        if tiling.backward_at_once:
            yield replace(entry, phase="forward")
            continue
        yield entry
        if entry.phase == "forward":
            yield replace(entry, phase="backward").times(2 if site.recomputed else 1)
