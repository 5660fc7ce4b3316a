"""Whether a strategy can run a model, and what it sends: checks and closed forms, without process groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from spbench.impls.layout import MEETINGS, Site, Unsupported
from spbench.impls.strategies.delegation import left_within, property_left_within
from spbench.impls.strategies.grid import GridHooks, as_sequences
from spbench.impls.traffic import Traffic

if TYPE_CHECKING:
    from spbench.impls.strategies.base import Strategy


class PlanningHooks(GridHooks):
    """The part of :class:`Strategy` that needs no tensors.

    Shape letters: L sequence, N ranks in the group.
    """

    name: ClassVar[str]
    axes: tuple[str, ...]
    size: int
    within: Strategy | None
    #: the keys of MEETINGS that it can run on more than one rank
    meets: ClassVar[frozenset[str]] = frozenset(MEETINGS)
    #: whether between the projections of a block a rank has some of the heads and features only
    splits_features: ClassVar[bool] = False

    def check(self, sites: Iterable[Site]) -> None:
        """Raise :class:`Unsupported` if the model's sites cannot be spread over the ranks of this strategy
        and of those within it."""
        sites = list(sites)
        self._check_lengths(sites)
        for strategy, seen in self.as_seen(sites):
            if strategy.size > 1:
                strategy._check_own(seen)

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
        for site in sites:
            if site.kind in MEETINGS and site.kind not in self.meets:
                raise Unsupported(
                    f"{self.name} has no {MEETINGS[site.kind]}", "use another strategy or another model"
                )
            if site.kind == "feature_norm" and self.splits_features:
                raise Unsupported(
                    f"{self.name} splits the features, over all of which this model normalises",
                    "set the model's option attention_norm to head",
                )
        self.check_sizes(list(as_sequences(sites, self.grid_dim)))

    def check_sizes(self, sites: Sequence[Site]) -> None:
        """The part of :meth:`check` that is about this strategy's sizes, called where it has more than one
        rank, with the sites as it sees them (:meth:`as_seen`)."""

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        """The coordinates 0 to ``size`` - 1 along one of its axes, in sets whose ranks run the same program.
        The first set is the one that sends the most, and the first of a set stands for it in traces."""
        return [list(range(size))]

    def as_seen(self, sites: Iterable[Site]) -> Iterator[tuple[Strategy, list[Site]]]:
        """This strategy and each within it, with the sites as that one sees them: with the positions that the
        strategies within it leave to a rank, and the heads and features that those around it do."""
        sites, within = list(sites), self.within
        yield cast("Strategy", self), sites if within is None else [within.outside(site) for site in sites]
        if within is not None:
            yield from within.as_seen([self.inside(site) for site in sites])

    @left_within
    def outside(self, site: Site) -> Site:
        """A site as strategies around this one see it: with the positions of one of its ranks."""
        return site

    def inside(self, site: Site) -> Site:
        """A site as the strategy within this one sees it: with the heads and features of one of its ranks."""
        return site

    def traffic(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        """Closed form of what this rank sends over the groups of this strategy and of those within it, each
        entry with its ``axes``, which are all of a strategy's where :meth:`communication`, whose arguments
        these are, names none."""
        for strategy, seen in self.as_seen(sites):
            for entry in strategy.communication(seen, element_bytes):
                yield entry if entry.axes else entry.over(*strategy.axes)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        """Closed form of what this rank sends over this strategy's own group for one micro-batch, and in the
        phases gradient_sync and optimizer for one step.

        Args:
            sites: what the model and the step ask for, as this strategy sees them (:meth:`as_seen`).
            element_bytes: bytes of an element of activations and gradients.
        """
        yield from ()

    @property_left_within
    def sequence_parts(self) -> int:
        """The number of parts that every sequence is split into."""
        return 1

    @property_left_within
    def sequence_part(self) -> int:
        """Which of :attr:`sequence_parts` this rank has, from 0."""
        return 0

    @property_left_within
    def length_multiple(self) -> int:
        """What every sequence length must be a multiple of."""
        return 1
