"""Plans of a strategy for given sizes, without process groups or tensors: checks of sizes, closed forms of
the traffic, the split of parameters over ranks, and the axes over which gradients are summed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, cast, final

from torch import nn

from spbench.impls.folding import FOLDED_AXES
from spbench.impls.layout import (
    HEEDED,
    HEEDING,
    MEETINGS,
    MeetingKind,
    Site,
    SiteKind,
    Unsupported,
    is_expert,
    shard_of,
)
from spbench.impls.place import Place
from spbench.impls.strategies.delegation import left_within, property_left_within
from spbench.impls.strategies.grid import GridHooks, as_sequences
from spbench.impls.tiles import entries_of_tiles, tiles_of, tiling_of
from spbench.impls.traffic import Traffic

#: ``vocabulary``: rows of an embedding or head; ``features``: weights that tensor parallelism can split;
#: ``mlp``: such weights of MLPs that :attr:`LayerHooks.of_mlp` makes; ``key_value``: projections to keys and
#: values of grouped-query attention, split into at most ``kv_heads`` parts; ``sequence``: one column a
#: position; ``experts``: routed experts, split over the folded axes in every strategy
ParameterKind = Literal["vocabulary", "features", "mlp", "key_value", "sequence", "experts", "others"]


class ParameterHooks:
    """Over which ranks are positions spread, and over which are parameters split?

    The ranks over which a gradient is summed follow from these two answers, in :meth:`partial_axes` only.
    """

    place: Place

    @property_left_within
    def position_axes(self) -> tuple[str, ...]:
        """The axes over which the positions of hidden states between blocks are spread. Each rank along these
        axes draws its own dropout and computes its share of the loss, a sum over all positions. So each rank
        has only a part of the gradient of a parameter that all these ranks hold."""
        return ()

    @left_within
    def split_over(self, kind: ParameterKind) -> tuple[str, ...]:
        """The axes over which parameters of a kind are split."""
        return ()

    @final
    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The axes over which this parameter's gradient is summed: the axes that positions are spread over,
        except the axis over which the parameter itself is split. (The one rank that holds a part of a
        parameter applies the part to all positions, so the rank has the part's whole gradient.)

        An expert's parameters have ("edp",), an axis that includes the replicas; without ep and etp they have
        the axes of other parameters, since every rank has all experts and positions of its own."""
        if is_expert(parameter) and self._folds_experts:
            return ("edp",)
        shard = shard_of(parameter)
        return self._summed_over(() if shard is None else (shard.axis,))

    @property
    def _folds_experts(self) -> bool:
        return self.place.size(*FOLDED_AXES) > 1

    def _summed_over(self, split: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.position_axes if axis not in split)

    @final
    def held_elements(self, site: Site) -> int:
        """The number of elements that one rank holds of the parameters of a site."""
        return sum(self._held_by_kind(site).values())

    @final
    def partial_elements(self, site: Site) -> Mapping[tuple[str, ...], int]:
        """The number of :meth:`held_elements` whose gradients must be summed, by the axes of the sum."""
        partial: Counter[tuple[str, ...]] = Counter()
        for kind, held in self._held_by_kind(site).items():
            if axes := self._partial_axes_of(kind):
                partial[axes] += held
        return partial

    def _partial_axes_of(self, kind: ParameterKind) -> tuple[str, ...]:
        """:meth:`partial_axes` of the parameters of a kind."""
        if kind == "experts":
            return ("edp",) if self._folds_experts else self.position_axes
        return self._summed_over(self.split_over(kind))

    def _held_by_kind(self, site: Site) -> dict[ParameterKind, int]:
        held = {}
        for kind, n in elements_by_kind(site).items():
            parts = self.place.size(*(FOLDED_AXES if kind == "experts" else self.split_over(kind)))
            # if there are more ranks than heads of keys and values, several ranks hold the same head
            held[kind] = n // (min(parts, site.dims["kv_heads"]) if kind == "key_value" else parts)
        return held


def elements_by_kind(site: Site) -> dict[ParameterKind, int]:
    """The number of elements of a site's parameters, over all ranks, by kind of parameter."""
    d = site.dims
    split, vocabulary, key_value = d.get("split", 0), d.get("vocabulary", 0), d.get("key_value", 0)
    mlp, experts = d.get("mlp", 0), d.get("experts", 0)
    elements: dict[ParameterKind, int] = {
        "vocabulary": vocabulary,
        "features": split - vocabulary - key_value - mlp,
        "mlp": mlp,
        "sequence": d.get("sequence", 0),
        "others": d["elements"] - split - experts,
    }
    few: dict[ParameterKind, int] = {"key_value": key_value, "experts": experts}
    return elements | {kind: n for kind, n in few.items() if n}


class PlanningHooks(GridHooks):
    """Can the strategy run these sizes, which ranks run the same program, and what does each rank send?"""

    name: ClassVar[str]
    axes: tuple[str, ...]
    size: int
    within: PlanningHooks | None
    place: Place
    if TYPE_CHECKING:

        @property
        def position_axes(self) -> tuple[str, ...]: ...

        @property
        def sequence_parts(self) -> int: ...

    #: the kinds of sites where positions meet that the strategy can run on more than one rank; by default
    #: not the indexer's attention, whose latents all heads share
    meets: ClassVar[frozenset[MeetingKind]] = frozenset(MEETINGS) - {"indexed_attention"}  # type: ignore[assignment]
    #: whether a rank has only some of the heads and features between the projections of a block
    splits_features: ClassVar[bool] = False

    @property
    @final
    def nested_axes(self) -> tuple[str, ...]:
        """The axes of this strategy and of all strategies within it."""
        return (*self.axes, *(() if self.within is None else self.within.nested_axes))

    @final
    def check(self, sites: Iterable[Site]) -> None:
        """Raise :class:`Unsupported` if the model's sites cannot be spread over the ranks of this strategy
        and of the strategies within it."""
        sites = list(sites)
        self._check_lengths(sites)
        self._check_experts([site for site in sites if site.kind == "experts"])
        for strategy, seen in self.as_seen(sites):
            strategy._check_heeded(seen)
            if strategy.size > 1:
                strategy._check_own(seen)

    def _check_experts(self, sites: Sequence[Site]) -> None:
        ep, etp = (self.place.size(axis) for axis in FOLDED_AXES)
        if not sites and ep * etp > 1:
            raise Unsupported("the model has no experts, which ep and etp are for", "leave ep and etp out")
        if etp > 1 and any(site.dims.get("adapted") for site in sites):
            raise Unsupported("adapters of experts are whole, and etp splits an expert", "use etp 1, and ep")
        alike = [axis for axis in self.nested_axes if axis not in self.position_axes]
        if sites and self.place.size(*alike) > 1:
            raise Unsupported(
                f"ranks along {' and '.join(alike)} of {self.name} hold the same tokens, which experts would "
                "be given several times",
                "use megatron_sp",
            )
        for site, (dim, what, axis, size) in itertools.product(
            sites, (("E", "experts", "ep", ep), ("F", "features of an expert", "etp", etp))
        ):
            if (n := site.dims[dim]) % size:
                fitting = [d for d in range(1, n + 1) if n % d == 0]
                nearest = [max(d for d in fitting if d < size), *[d for d in fitting if d > size][:1]]
                mend = f"use {axis} {' or '.join(map(str, nearest))}"
                raise Unsupported(f"{n} {what} are not divisible by {axis} {size}", mend)

    def _check_heeded(self, sites: Iterable[Site]) -> None:
        for site, (word, what) in itertools.product(sites, HEEDED.items()):
            if word in site.dims and word not in self.heeded(site.kind):
                kind = MEETINGS[cast(MeetingKind, site.kind)]
                raise Unsupported(
                    f"{kind} of {self.name} has no {what}", "use another strategy, or leave them out"
                )

    def _check_lengths(self, sites: Iterable[Site]) -> None:
        multiple, parts = self.length_multiple, self.sequence_parts
        for site in as_sequences(sites, self.grid_dim):
            length = site.dims.get("L", multiple)
            if length % multiple:
                below = length - length % multiple
                lengths = " or ".join(str(n) for n in (below, below + multiple) if n)
                times = {1: "", 2: "twice "}.get(multiple // parts, f"{multiple // parts} times ")
                raise Unsupported(
                    f"sequence length {length} is not divisible by {times}{parts} ranks",
                    f"use a sequence length of {lengths}",
                )

    def _check_own(self, sites: Sequence[Site]) -> None:
        if lacking := self.lacking(sites):
            raise Unsupported(lacking, self._instead(sites))
        for site in sites:
            if site.kind == "given_heads" and self.splits_features:
                raise Unsupported(
                    f"{self.name} splits the projections to heads, and this model is given its heads",
                    "use a strategy that splits sequences alone",
                )
            if site.kind == "feature_norm" and self.splits_features:
                raise Unsupported(
                    f"{self.name} splits the features, over all of which this model normalises",
                    "set its option attention_norm or qk_norm_over to head, or split sequences alone",
                )
        self.check_sizes(list(as_sequences(sites, self.grid_dim)))

    @classmethod
    def lacking(cls, sites: Iterable[Site]) -> str:
        """Why the strategy cannot run a model with these sites, whatever their sizes; "" if it can."""
        lacks = (site.kind for site in sites if site.kind in MEETINGS and site.kind not in cls.meets)
        return next((f"{cls.name} has no {MEETINGS[kind]}" for kind in lacks), "")

    def _instead(self, sites: Sequence[Site]) -> str:
        """The advice of an error: the names of strategies that can run these sites, only those over the same
        axes if there are some."""
        taking = {c.name: c.axes for c in _packaged(PlanningHooks) if c.axes and not c.lacking(sites)}
        alike = sorted(name for name, axes in taking.items() if axes == self.axes) or sorted(taking)
        models = f"another model (spbench list models {self.name})"
        return f"use {', '.join([*alike, ''])}or {models}" if alike else f"use {models}"

    def check_sizes(self, sites: Sequence[Site]) -> None:
        """Raise :class:`Unsupported` if this strategy cannot split these sizes over its ranks. It is called
        on more than one rank, with the sites of :meth:`as_seen`, those on grids as sequences."""

    @classmethod
    @final
    def heeded(cls, kind: SiteKind) -> frozenset[str]:
        """The entries of ``heeds`` for a kind of site; empty for a class that overrides how positions meet at
        such sites and does not declare ``heeds``."""
        for each in cls.__mro__:
            if kind in (said := vars(each).get("heeds", {})):
                return frozenset(said[kind])
            if not HEEDING.get(kind, frozenset()).isdisjoint(vars(each)):
                break
        return frozenset()

    @classmethod
    @final
    def marks_all_work(cls) -> bool:
        """``marks_work``; False for a class that overrides how positions meet without a ``marks_work``."""
        meet = frozenset.union(*HEEDING.values())
        for each in cls.__mro__:
            if "marks_work" in vars(each):
                return bool(vars(each)["marks_work"])
            if not meet.isdisjoint(vars(each)):
                break
        return False

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        """The coordinates 0 to ``size`` - 1 along one of the strategy's axes, as sets of ranks that run the
        same program. The first set sends the most; the first rank of each set is traced for the set."""
        return [list(range(size))]

    @final
    def as_seen(self, sites: Iterable[Site]) -> Iterator[tuple[PlanningHooks, list[Site]]]:
        """Yields this strategy and each one within it, with the sites as that strategy sees them: heads and
        features of one rank of the strategies around, positions of one rank of the strategies within."""
        sites, within = list(sites), self.within
        yield self, sites if within is None else [within.outside(site) for site in sites]
        if within is not None:
            yield from within.as_seen([self.inside(site) for site in sites])

    @left_within
    def outside(self, site: Site) -> Site:
        """A site as strategies around this one see it: with the positions of one rank of this strategy."""
        return site

    def inside(self, site: Site) -> Site:
        """A site as the strategy within sees it: with the heads and features of one rank of this strategy."""
        return site

    @final
    def traffic(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        """Yields the closed forms of this strategy and of those within it; arguments as in
        :meth:`communication`. An entry that names no ``axes`` goes over all axes of its strategy."""
        whole = []
        for site in sites:
            if not (tiling := tiling_of(site)):
                whole.append(site)
                continue
            for tile in tiles_of(site, tiling, self.sequence_parts):
                yield from entries_of_tiles(self._traffic_of([tile], element_bytes), site, tiling)
        yield from self._traffic_of(whole, element_bytes)

    def _traffic_of(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for strategy, seen in self.as_seen(sites):
            for entry in strategy.communication(seen, element_bytes):
                yield entry if entry.axes else entry.over(*strategy.axes)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        """The closed form: yields the messages of this rank over this strategy's own group, of one
        micro-batch in the phases forward and backward, and of one step in gradient_sync and optimizer.

        Args:
            sites: sites of the model and the step, as this strategy sees them (:meth:`as_seen`).
            element_bytes: bytes of an element of activations and gradients.
        """
        yield from ()

    @property_left_within
    def length_multiple(self) -> int:
        """The number that must divide every sequence length."""
        return 1


def _packaged(cls: type[PlanningHooks]) -> Iterator[type[PlanningHooks]]:
    """Yields the strategies of this package, which are all imported before one is looked up by name. Messages
    name no plug-ins, because another installation may lack them."""
    for each in sorted(cls.__subclasses__(), key=lambda each: each.__name__):
        if "name" in vars(each) and each.__module__.startswith(__package__ or ""):
            yield each
        yield from _packaged(each)
