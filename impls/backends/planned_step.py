"""The arguments of closed forms of a backend's traffic: a planned step, and sets of parameters whose
gradients are summed over one group."""

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
    """A set of parameters whose gradients are summed over one group. The rank holds ``elements`` elements of
    them; the group has ``ranks`` ranks along the strategy's ``axes`` (1 without axes) and all ``replicas``.
    Ranks along ("edp",) are replicas already, so ``replicas`` is 1 for this axis."""

    axes: tuple[str, ...]
    elements: int
    ranks: int
    replicas: int

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return self.ranks * self.replicas

    @property
    def group_axes(self) -> tuple[str, ...]:
        """The mesh axes of the group, replicas included."""
        return summed_axes(self.axes)


@dataclass(frozen=True)
class PlannedStep:
    """The arguments of a closed form of a backend's traffic.

    Attributes:
        summed: the parameters of a rank, in sets with one group each.
        micro_batches: number of forward and backward passes in a step.
        precision: dtypes of weights, gradients and optimizer.
        strategy: the strategy at the place of the rank, without process groups.
        around: data and pipeline parallelism around the strategy, without process groups.
        build: function that builds the rank's module on the meta device.
        passes: function that returns, for each of the rank's stages, the order of a step's forwards (True)
            and backwards (False).
        options: the backend's options.
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
        """The shapes of all parameters: the :meth:`Backend.cuts` of a backend that keeps all parameters in
        one buffer during forward or backward. No two depths of a model have the same shapes."""
        return tuple(p.shape for p in self.build().parameters())


def planned_sums(sites: Sequence[Site], strategy: Strategy, replicas: int) -> list[Summed]:
    """The sets of parameters of a rank by the group that sums their gradients, from a model's sites."""
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
