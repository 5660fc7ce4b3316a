"""Where gradients are held, and how they are summed over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spbench.impls.composition import Composition, is_partial
from spbench.impls.strategies.base import Strategy


class ContiguousGradients:
    """Gradients as views of contiguous buffers, one for those to be summed over the group and one for
    the others, so that a sync is a single all-reduce and gradients are never freed."""

    def __init__(self, module: nn.Module, strategy: Strategy, around: Composition | None = None):
        self.module, self.strategy, self.around = module, strategy, around or Composition()
        self.buffers: list[tuple[bool, Tensor]] = []
        for partial in (True, False):
            parameters = [p for p in module.parameters() if is_partial(p, strategy) is partial]
            if parameters:
                buffer = parameters[0].new_zeros(sum(p.numel() for p in parameters))
                for p, piece in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
                    p.grad = piece.view_as(p)
                self.buffers.append((partial, buffer))

    def tensors(self) -> list[Tensor]:
        """What is held between steps."""
        return [buffer for _, buffer in self.buffers]

    def zero(self) -> None:
        """Before a step."""
        for _, buffer in self.buffers:
            buffer.zero_()

    def synchronize(self) -> None:
        """Sum over the group the gradients of which each rank holds a part of the sum."""
        for partial, buffer in self.buffers:
            self.around.reduce(buffer, partial, self.strategy)
        self.around.add_tied(self.module)


class StaleGradients:
    """Gradients as Megatron-LM's local DDP of 2021 held them: a tensor for each parameter, made anew by
    each backward, while those of the step before stay alive (as ``main_grad``) until the next sync."""

    def __init__(self, module: nn.Module, strategy: Strategy, around: Composition | None = None):
        self.module, self.strategy, self.around = module, strategy, around or Composition()
        self.parameters = list(module.parameters())
        self.stale = [torch.zeros_like(p) for p in self.parameters]  # as after a step

    def tensors(self) -> list[Tensor]:
        return self.stale

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None

    def synchronize(self) -> None:
        self.stale = [p.grad for p in self.parameters if p.grad is not None]
        for partial in (True, False):
            mine = [p for p in self.parameters if is_partial(p, self.strategy) is partial]
            gradients = [p.grad for p in mine if p.grad is not None]
            if gradients and (partial or self.around.dp_group):
                flat = torch.cat([g.flatten() for g in gradients])
                self.around.reduce(flat, partial, self.strategy)
                for g, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                    g.copy_(piece.view_as(g))
        self.around.add_tied(self.module)
