"""How a strategy lays out parameters, and over which axes their gradients are therefore summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, final

from torch import nn

from spbench.impls.axes import Place
from spbench.impls.layout import Site, shard_of
from spbench.impls.strategies.delegation import left_within, property_left_within

#: ``vocabulary``: rows of an embedding or head; ``features``: what tensor parallelism can split;
#: ``key_value``: projections to keys and values of grouped-query attention, which it can split into
#: ``kv_heads`` parts; ``sequence``: one column a position
ParameterKind = Literal["vocabulary", "features", "key_value", "sequence", "others"]


class ParameterHooks:
    """Over which ranks are positions spread, and parameters split?

    The ranks over which a gradient is summed follow from both, here alone.
    """

    place: Place

    @property_left_within
    def position_axes(self) -> tuple[str, ...]:
        """The axes over which the positions of hidden states between blocks are spread. Each of their ranks
        draws its own dropout and computes its share of the loss, a sum over all positions. So each rank has
        only a part of the gradient of a parameter that all of them hold."""
        return ()

    @left_within
    def split_over(self, kind: ParameterKind) -> tuple[str, ...]:
        """The axes over whose ranks parameters of a kind are split."""
        return ()

    @final
    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The axes over which this parameter's gradient must be summed: those over which positions are
        spread, except the axis over which the parameter itself is split. (The one rank that holds a part of a
        parameter applies it to all positions, so it has that part's whole gradient.)"""
        shard = shard_of(parameter)
        return self._summed_over(() if shard is None else (shard.axis,))

    def _summed_over(self, split: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.position_axes if axis not in split)

    @final
    def held_elements(self, site: Site) -> int:
        """Elements that one rank holds of the parameters of a site."""
        return sum(self._held_by_kind(site).values())

    @final
    def partial_elements(self, site: Site) -> Mapping[tuple[str, ...], int]:
        """Those of :meth:`held_elements` whose gradients must be summed, by :meth:`partial_axes`."""
        partial: Counter[tuple[str, ...]] = Counter()
        for kind, held in self._held_by_kind(site).items():
            if axes := self._summed_over(self.split_over(kind)):
                partial[axes] += held
        return partial

    def _held_by_kind(self, site: Site) -> dict[ParameterKind, int]:
        held = {}
        for kind, n in elements_by_kind(site).items():
            parts = self.place.size(*self.split_over(kind))
            # more ranks than that hold replicas
            held[kind] = n // (min(parts, site.dims["kv_heads"]) if kind == "key_value" else parts)
        return held


def elements_by_kind(site: Site) -> dict[ParameterKind, int]:
    """Elements of a site's parameters of each kind."""
    d = site.dims
    split, vocabulary, key_value = d.get("split", 0), d.get("vocabulary", 0), d.get("key_value", 0)
    elements: dict[ParameterKind, int] = {
        "vocabulary": vocabulary,
        "features": split - vocabulary - key_value,
        "sequence": d.get("sequence", 0),
        "others": d["elements"] - split,
    }
    return elements | ({"key_value": key_value} if key_value else {})
