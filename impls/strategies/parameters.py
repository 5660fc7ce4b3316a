"""How a strategy lays out parameters, and over which axes their gradients are therefore summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from spbench.impls.axes import Place
from spbench.impls.layout import Site, shard_of
from spbench.impls.strategies.delegation import left_within, property_left_within


class ParameterHooks:
    """The part of :class:`Strategy` about parameters.

    A strategy says over which axes it spreads positions, and over which it splits parameters of each kind.
    What gradients are summed over follows from both, here alone.
    """

    place: Place

    @property_left_within
    def position_axes(self) -> tuple[str, ...]:
        """The axes over whose ranks the positions of hidden states between blocks are spread. Each of them
        draws its own dropout, computes its share of the loss, which is one sum over all positions, and makes
        its part of the gradient of what all of them hold."""
        return ()

    @left_within
    def split_over(self, kind: str) -> tuple[str, ...]:
        """The axes over whose ranks parameters of a kind, a key of :func:`elements_by_kind`, are split."""
        return ()

    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The axes over whose ranks this parameter's gradient must be summed, since backward gives each of
        them a part of the sum: those over which positions are spread, but for one over which the parameter
        itself is split, for of what a rank has a part of alone, it has the whole gradient."""
        shard = shard_of(parameter)
        return self._summed_over(() if shard is None else (shard.axis,))

    def _summed_over(self, split: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.position_axes if axis not in split)

    def held_elements(self, site: Site) -> int:
        """Elements that one rank holds of the parameters of a site."""
        return sum(self._held_by_kind(site).values())

    def partial_elements(self, site: Site) -> Mapping[tuple[str, ...], int]:
        """Of :meth:`held_elements`, those with :meth:`partial_axes`, by these axes."""
        found: Counter[tuple[str, ...]] = Counter()
        for kind, held in self._held_by_kind(site).items():
            if axes := self._summed_over(self.split_over(kind)):
                found[axes] += held
        return found

    def _held_by_kind(self, site: Site) -> dict[str, int]:
        held = {}
        for kind, n in elements_by_kind(site).items():
            parts = self.place.size(*self.split_over(kind))
            # more ranks than that hold replicas
            held[kind] = n // (min(parts, site.dims["kv_heads"]) if kind == "key_value" else parts)
        return held


def elements_by_kind(site: Site) -> dict[str, int]:
    """Elements of a site's parameters: of the ``vocabulary``, of ``features`` that tensor parallelism can
    split, of grouped-query attention's projections to keys and values (``key_value``), which it can split
    into ``kv_heads`` parts, those with a column a position (``sequence``), and the ``others``."""
    d = site.dims
    split, vocabulary, key_value = d.get("split", 0), d.get("vocabulary", 0), d.get("key_value", 0)
    found = {
        "vocabulary": vocabulary,
        "features": split - vocabulary - key_value,
        "sequence": d.get("sequence", 0),
        "others": d["elements"] - split,
    }
    return found | ({"key_value": key_value} if key_value else {})
