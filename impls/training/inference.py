"""A forward pass alone, as a trained model is used: no gradients and no optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from spbench.impls.composition import Composition


class Inference:
    """A module with what a forward pass needs, which engines run like :class:`Training`.

    Args:
        module: maps a dict of this rank's inputs to a dict of outputs.
        around: data parallelism.
    """

    def __init__(self, module: nn.Module, around: Composition):
        self.module, self.around = module, around

    def held(self) -> dict[str, list[Tensor]]:
        """What is held between steps, as :meth:`Backend.held` has it."""
        return {"parameters": list(self.module.parameters())}

    def step(
        self,
        inputs: Mapping[str, Tensor],
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> dict[str, Tensor]:
        """The outputs for this rank's inputs."""
        with torch.no_grad(), phase("forward"):
            outputs: dict[str, Tensor] = self.module(inputs)
            return outputs
