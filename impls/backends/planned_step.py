"""What closed forms of a backend's traffic are made of: a planned step, and the sets of parameters whose
gradients are summed over one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import nn

from spbench.impls.backends.optimizer import Precision
from spbench.impls.composition import Composition, summed_axes
from spbench.impls.folding import folds
from spbench.impls.options import Options
from spbench.impls.strategies.base import Site, Strategy


@dataclass(frozen=True)
class Summed:
    """Parameters that a rank holds (``elements`` of them) whose gradients are summed over one group: over
    ``ranks`` along these ``axes`` of the strategy (1 without axes) and all ``replicas``. Those along ("edp",)
    are replicas of experts already, so ``replicas`` is 1 there."""

    axes: tuple[str, ...]
    elements: int
    ranks: int
    replicas: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.ranks * self.replicas

    @property
    def group_axes(self) -> tuple[str, ...]:
        """The axes of the group."""
        return summed_axes(self.axes)


@dataclass(frozen=True)
class PlannedStep:
    """The arguments of a closed form of a backend's traffic.

    Attributes:
        summed: the parameters of a rank.
        micro_batches: forward and backward passes in a step.
        precision: of weights, gradients and optimizer.
        strategy: planned, at the place of the rank.
        around: the strategy around it, planned in the same way.
        build: builds the rank's module on the meta device, for backends that pad each parameter.
        passes: makes, for each of the rank's stages, the order of a step's forwards (True) and backwards
            (False).
        options: of the backend.
    """

    summed: Sequence[Summed]
    micro_batches: int
    precision: Precision
    strategy: Strategy
    around: Composition
    build: Callable[[], nn.Module]
    passes: Callable[[], Sequence[Sequence[bool]]]
    options: Options

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights and gradients in messages."""
        return self.precision.parameters.itemsize

    def shapes(self) -> Hashable:
        """The shapes of all parameters, as :meth:`Backend.cuts` of a buffer that holds all parameters where
        forward or backward needs it; no two depths have the same."""
        return tuple(p.shape for p in self.build().parameters())


def planned_sums(sites: Sequence[Site], strategy: Strategy, replicas: int) -> list[Summed]:
    """The sets of parameters that backends' closed forms sum, from a model's sites."""
    held = sum(strategy.held_elements(s) * s.count for s in sites if s.kind == "parameters")
    partial: Counter[tuple[str, ...]] = Counter()
    for site in (s for s in sites if s.kind == "parameters"):
        partial.update({axes: n * site.count for axes, n in strategy.partial_elements(site).items()})
    sets = [
        Summed(axes, n, strategy.place.size(*axes), 1 if folds(axes) else replicas)
        for axes, n in partial.items()
    ]
    sets.append(Summed((), held - partial.total(), 1, replicas))
    return [summed for summed in sets if summed.elements]
