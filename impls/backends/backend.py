"""What a training step asks of a data-parallel backend.

A gradient that the strategy's ranks each hold a part of is summed over them and over all replicas at once;
any other over the replicas alone. So a backend sees at most two sets of parameters, each with the group
that its gradients are summed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.collectives import Traffic
from spbench.impls.composition import Composition, is_partial
from spbench.impls.precision import Precision
from spbench.impls.strategies.base import Site, Strategy, shard_of


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter or its gradient: from ``start`` on along ``dim``; without ``dim``, of
    the flattened whole."""

    values: Tensor
    start: int = 0
    dim: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The same part of a whole tensor (a view of a contiguous one)."""
        if self.dim is None:
            return whole.flatten().narrow(0, self.start, len(self.values))
        return whole.narrow(self.dim, self.start, self.values.shape[self.dim])


@dataclass(frozen=True)
class Summed:
    """Parameters that a rank holds (``elements`` of them) whose gradients are summed over one group: over
    ``ranks`` of the strategy (1 where they are not ``partial``) and all ``replicas``."""

    partial: bool
    elements: int
    ranks: int
    replicas: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.ranks * self.replicas


@dataclass(frozen=True)
class PlannedStep:
    """What a closed form of a backend's traffic depends on.

    Attributes:
        summed: the parameters of a rank.
        micro_batches: of the step.
        precision: of the training.
        strategy: of the rank.
        build: makes the rank's module, without values, for those that pad each parameter.
    """

    summed: Sequence[Summed]
    micro_batches: int
    precision: Precision
    strategy: Strategy
    build: Callable[[], nn.Module]

    @property
    def element_bytes(self) -> int:
        """Of an element of weights and gradients as they are sent."""
        return self.precision.parameters.itemsize


class Backend(ABC):
    """Holds a module's gradients and its optimizer.

    Args:
        module: with its weights set. A backend that shards them takes its parameters over.
        precision: one of :data:`PRECISIONS`.
        moments: "kept" or "later"; see :class:`Training`.
        gradients: "contiguous" or "stale", which only ``legacy_ddp`` has a choice of.
        learning_rate: of AdamW.
    """

    name: ClassVar[str]
    #: whether its ranks may be stages of a pipeline
    pipelined: ClassVar[bool] = True
    optimizer: Optimizer

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        around: Composition,
        precision: Precision,
        *,
        micro_batches: int = 1,
        moments: str = "kept",
        gradients: str = "contiguous",
        learning_rate: float = 1e-4,
    ):
        self.module, self.strategy, self.around, self.precision = module, strategy, around, precision
        self.micro_batches = micro_batches
        self.names = {p: name for name, p in module.named_parameters()}
        # what lies differently on the strategy's ranks overflows on one of them alone
        spread = any(shard_of(p) for p in self.names)
        self.overflow_groups = [strategy.group if spread else None, around.pp_group]
        self.settings: dict[str, Any] = {"with_moments": moments == "kept", "lr": learning_rate}

    def summed(self) -> Iterator[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]:
        """The parameters by the group that their gradients are summed over (None: a rank alone)."""
        for partial in (True, False):
            parameters = [p for p in self.names if is_partial(p, self.strategy) is partial]
            if parameters:
                yield self.around.gradient_group(partial, self.strategy), parameters

    @abstractmethod
    def zero(self) -> None:
        """Before a step."""

    @abstractmethod
    def synchronize(self) -> None:
        """After all backwards: the gradients that this rank holds are sums over their groups."""

    def step(self) -> None:
        """Update the weights from the gradients."""
        self.optimizer.step()

    def held(self) -> dict[str, list[Tensor]]:
        """What is held between steps, by the category that the memory meter has for it: ``parameters``,
        ``gradients`` and ``optimizer_state``."""
        return {
            "parameters": list(self.names),
            "gradients": self.held_gradients(),
            "optimizer_state": self.optimizer.tensors(),
        }

    @abstractmethod
    def held_gradients(self) -> list[Tensor]:
        """Gradients, and buffers of them, that are held between steps."""

    def gradient_parts(self) -> dict[str, Part]:
        """After :meth:`synchronize`: what this rank holds of each parameter's gradient."""
        return {name: Part(p.grad.flatten()) for p, name in self.names.items() if p.grad is not None}

    def weight_parts(self) -> dict[str, Part]:
        """Between steps: what this rank holds of each parameter."""
        return {name: Part(p.detach().flatten()) for p, name in self.names.items()}

    @classmethod
    @abstractmethod
    def traffic(cls, step: PlannedStep) -> Iterator[tuple[Traffic, int]]:
        """Closed form of what a rank sends, with the size of the group it goes to."""


def planned_sums(sites: Sequence[Site], strategy: Strategy, replicas: int) -> list[Summed]:
    """What the closed forms of backends sum, from a model's sites."""
    held = sum(strategy.held_elements(s) * s.count for s in sites if s.kind == "parameters")
    partial = sum(strategy.partial_elements(s) * s.count for s in sites if s.kind == "parameters")
    found = [Summed(True, partial, strategy.size, replicas), Summed(False, held - partial, 1, replicas)]
    return [summed for summed in found if summed.elements]
