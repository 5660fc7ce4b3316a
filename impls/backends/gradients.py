"""Where gradients are held, and how they are summed over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spbench.impls.composition import Composition, by_partial_axes
from spbench.impls.strategies.base import Strategy


class ContiguousGradients:
    """Gradients as views of contiguous buffers, one for those to be summed over the group and one for
    the others, so that a sync is a single all-reduce and gradients are never freed."""

    def __init__(self, module: nn.Module, strategy: Strategy, around: Composition | None = None):
        self.module, self.around = module, around or Composition()
        self.buffers: list[tuple[tuple[str, ...], Tensor]] = []
        for axes, parameters in by_partial_axes(module.parameters(), strategy).items():
            buffer = parameters[0].new_zeros(sum(p.numel() for p in parameters))
            for p, piece in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
                p.grad = piece.view_as(p)
            self.buffers.append((axes, buffer))
            self.around.place.group(*axes)  # made now, not in the first step

    def tensors(self) -> list[Tensor]:
        """What is held between steps."""
        return [buffer for _, buffer in self.buffers]

    def zero(self) -> None:
        """Before a step."""
        for _, buffer in self.buffers:
            buffer.zero_()

    def synchronize(self) -> None:
        """Sum over the group the gradients of which each rank holds a part of the sum."""
        for axes, buffer in self.buffers:
            self.around.reduce(buffer, axes)
        self.around.add_tied(self.module)


class StaleGradients:
    """Gradients as Megatron-LM's local DDP of 2021 held them: a tensor for each parameter, made anew by
    each backward, while those of the step before stay alive (as ``main_grad``) until the next sync."""

    def __init__(self, module: nn.Module, strategy: Strategy, around: Composition | None = None):
        self.module, self.strategy, self.around = module, strategy, around or Composition()
        self.parameters = list(module.parameters())
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
