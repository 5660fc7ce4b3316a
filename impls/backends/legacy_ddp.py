"""Gradients summed by one all-reduce after backward, as fairseq's and Megatron-LM's own ("legacy") DDP do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from spbench.impls.backends.backend import Backend
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.optimizer_options import OptimizerOptions
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.composition import Composition, by_partial_axes, trained_parameters
from spbench.impls.folding import folds
from spbench.impls.strategies.base import Strategy
from spbench.impls.traffic import Traffic


class ContiguousGradients:
    """Gradients as views of contiguous buffers, a buffer for each set of axes over which gradients are
    summed, so that a sync is one all-reduce a buffer and gradients are never freed."""

    def __init__(self, module: nn.Module, strategy: Strategy, around: Composition | None = None):
        self.module, self.around = module, around or Composition()
        self.buffers: list[tuple[tuple[str, ...], Tensor]] = []
        for axes, parameters in by_partial_axes(trained_parameters(module), strategy).items():
            buffer = parameters[0].new_zeros(sum(p.numel() for p in parameters))
            for p, piece in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
                p.grad = piece.view_as(p)
            self.buffers.append((axes, buffer))
            self.around.place.group(*axes)  # made now, not in the first step

    def tensors(self) -> list[Tensor]:
        """The buffers of gradients, which live from step to step."""
        return [buffer for _, buffer in self.buffers]

    def zero(self) -> None:
        """Set all gradients to 0, before a step."""
        for _, buffer in self.buffers:
            buffer.zero_()

    def synchronize(self) -> None:
        """Sum each buffer over its ranks and over the replicas, after the last backward."""
        for axes, buffer in self.buffers:
            self.around.reduce(buffer, axes)
        self.around.add_tied(self.module)


class StaleGradients:
    """Gradients as in Megatron-LM's local DDP of 2021: each backward allocates a tensor for each parameter,
    and the gradients of the step before stay alive (as ``main_grad``) until the next sync."""

    def __init__(self, module: nn.Module, strategy: Strategy, around: Composition | None = None):
        self.module, self.strategy, self.around = module, strategy, around or Composition()
        self.parameters = trained_parameters(module)
        self.stale = [torch.zeros_like(p) for p in self.parameters]  # as after a step
        for axes in by_partial_axes(self.parameters, strategy):
            self.around.place.group(*axes)  # made now, not in the first step

    def tensors(self) -> list[Tensor]:
        return self.stale

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None

    def synchronize(self) -> None:
        self.stale = [p.grad for p in self.parameters if p.grad is not None]
        for axes, parameters in by_partial_axes(self.parameters, self.strategy).items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients and (axes or self.around.dp_group):
                flat = torch.cat([g.flatten() for g in gradients])
                self.around.reduce(flat, axes)
                for g, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                    g.copy_(piece.view_as(g))
        self.around.add_tied(self.module)


@dataclass(frozen=True)
class LegacyOptions(OptimizerOptions):
    """Options of :class:`LegacyDistributedDataParallel`.

    Attributes:
        gradients: the class that holds gradients: "contiguous", :class:`ContiguousGradients`; "stale",
            :class:`StaleGradients`.

    Raises:
        ValueError: another word, or stale gradients with an optimizer on the host, which neither program has.
    """

    gradients: Literal["contiguous", "stale"] = "contiguous"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.gradients, self.optimizer) == ("stale", "host"):
            raise ValueError(
                "gradients: stale keeps float32 gradients of the step before on the device, where with "
                "optimizer: host there are none; set gradients: contiguous"
            )


class LegacyDistributedDataParallel(Backend):
    """Two all-reduces after backward: one over the strategy's ranks, of gradients that are partial sums on
    each of them, and then one over the replicas, of all gradients."""

    name = "legacy_ddp"
    searched = False
    spans_layers = True  # in one buffer that forward and backward need
    shares_out = frozenset()
    host_waits_for_transfers = True
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
        # the sum over edp includes the replicas
        elements = sum(summed.elements for summed in step.summed if not folds(summed.axes))
        payload = elements * step.element_bytes
        yield Traffic("gradient_sync", "data parallel gradients", "all_reduce", 1, payload, ("dp",))
