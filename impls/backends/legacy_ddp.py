"""Gradients summed by one all-reduce after backward, as fairseq's and Megatron-LM's own ("legacy") DDP do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from spbench.impls.backends.backend import Backend, PlannedStep
from spbench.impls.backends.gradients import ContiguousGradients, StaleGradients
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.options import Options
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class LegacyOptions(Options):
    """What may be chosen about :class:`LegacyDistributedDataParallel`.

    Attributes:
        gradients: how they are held between steps: :class:`ContiguousGradients` or :class:`StaleGradients`.
    """

    gradients: Literal["contiguous", "stale"] = "contiguous"


class LegacyDistributedDataParallel(Backend):
    """Two all-reduces after backward: one over the strategy's ranks, of gradients that are partial sums on
    each of them, and then one over the replicas, of all gradients."""

    name = "legacy_ddp"
    counts_backwards = False
    options_type = LegacyOptions
    options: LegacyOptions

    def prepare(self) -> Optimizer:
        stale = self.options.gradients == "stale"
        made = StaleGradients if stale else ContiguousGradients
        self.gradients = made(self.module, self.strategy, self.around)
        return self.make_optimizer(list(self.names), master_gradients="stale" if stale else "made")

    def zero(self) -> None:
        self.gradients.zero()

    def synchronize(self) -> None:
        self.gradients.synchronize()

    def held_gradients(self) -> list[Tensor]:
        return self.gradients.tensors()

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        for summed in step.summed:
            payload = summed.elements * step.element_bytes
            yield Traffic("gradient_sync", "gradients", "all_reduce", 1, payload, summed.axes)
        elements = sum(summed.elements for summed in step.summed)
        payload = elements * step.element_bytes
        yield Traffic("gradient_sync", "data parallel gradients", "all_reduce", 1, payload, ("dp",))
