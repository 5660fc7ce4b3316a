"""Losses that layers have beside the model's, such as those that balance experts.

A layer's loss is attached to a tensor that the layer uses anyway: backward of that tensor begins the loss's
own (Megatron-LM's MoEAuxLossAutoScaler). So it needs no output of the layer, and works in every pipeline
stage and in layers that run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _unscaled(loss: Tensor) -> Tensor:
    return loss


class AuxiliaryLosses:
    """How much each counts in a step.

    Args:
        replicas: of data parallelism.

    Attributes:
        micro_batches: of a replica in a step. A loss is the mean over micro-batches of all replicas.
        scaled: multiplies a loss by the optimizer's loss scale.
    """

    def __init__(self, replicas: int):
        self.replicas = replicas
        self.micro_batches = 1
        self.scaled: Callable[[Tensor], Tensor] = _unscaled

    def begin_step(self, micro_batches: int, scaled: Callable[[Tensor], Tensor]) -> None:
        """Take what the training of a step does with its loss."""
        self.micro_batches, self.scaled = micro_batches, scaled

    def attach(self, x: Tensor, loss: Tensor) -> Tensor:
        """x, with whose backward that of ``loss`` begins: this rank's share of a micro-batch's."""
        attached: Tensor = _Attached.apply(x, loss, self)
        return attached


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, losses: AuxiliaryLosses) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.losses = losses
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        losses: AuxiliaryLosses = ctx.losses
        share = 1 / (losses.replicas * losses.micro_batches)
        return d_x, losses.scaled(torch.full_like(loss, share)).to(loss.dtype), None
