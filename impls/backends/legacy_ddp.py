"""Gradients summed by one all-reduce after backward, as fairseq's and Megatron-LM's own ("legacy") DDP do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from spbench.impls.backends.backend import Backend, PlannedStep
from spbench.impls.backends.gradients import ContiguousGradients, StaleGradients
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.collectives import Traffic
from spbench.impls.composition import Composition
from spbench.impls.precision import Precision
from spbench.impls.strategies.base import Strategy


class LegacyDistributedDataParallel(Backend):
    """First over the strategy's ranks, what is partial, then over the replicas, everything."""

    name = "legacy_ddp"

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        around: Composition,
        precision: Precision,
        *,
        gradients: str = "contiguous",
        **settings: Any,
    ):
        super().__init__(module, strategy, around, precision, **settings)
        stale = gradients == "stale"
        self.gradients = (StaleGradients if stale else ContiguousGradients)(module, strategy, around)
        self.optimizer = Optimizer(
            list(self.names),
            precision,
            master_gradients="stale" if stale else "made",
            overflow_groups=self.overflow_groups,
            **self.settings,
        )

    def zero(self) -> None:
        self.gradients.zero()

    def synchronize(self) -> None:
        self.gradients.synchronize()

    def held_gradients(self) -> list[Tensor]:
        return self.gradients.tensors()

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[tuple[Traffic, int]]:
        for summed in step.summed:
            payload = summed.elements * step.element_bytes
            yield Traffic("gradient_sync", "gradients", "all_reduce", 1, payload), summed.ranks
        elements = sum(summed.elements for summed in step.summed)
        replicas = max((summed.replicas for summed in step.summed), default=1)
        yield (
            Traffic(
                "gradient_sync", "data parallel gradients", "all_reduce", 1, elements * step.element_bytes
            ),
            replicas,
        )
