"""Losses that layers add to the model's loss, such as the loss that balances experts.

A layer's loss is attached to a tensor that the layer uses anyway: the backward of that tensor starts the
backward of the loss (Megatron-LM's MoEAuxLossAutoScaler). So the loss needs no output of the layer, and works
in every pipeline stage and in layers that run again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spbench.impls.kernels.operator import differentiable


def _unscaled(loss: Tensor) -> Tensor:
    return loss


class AuxiliaryLosses:
    """Attaches auxiliary losses to tensors, and weights each loss for the mean over a step's micro-batches.

    Args:
        replicas: the number of data parallel replicas.

    Attributes:
        micro_batches: number per replica and step. A loss is the mean over micro-batches of all replicas.
        scaled: the function that multiplies a loss by the optimizer's loss scale.
    """

    def __init__(self, replicas: int):
        self.replicas = replicas
        self.micro_batches = 1
        self.scaled: Callable[[Tensor], Tensor] = _unscaled

    def begin_step(self, micro_batches: int, scaled: Callable[[Tensor], Tensor]) -> None:
        """Set the attributes for the step that begins."""
        self.micro_batches, self.scaled = micro_batches, scaled

    def attach(self, x: Tensor, loss: Tensor) -> Tensor:
        """Returns x as a view whose backward also starts the backward of ``loss``, a scalar of this rank."""
        attached: Tensor = _ATTACHED(x, loss, self)
        return attached


def _gradients(d_x: Tensor, loss: Tensor, losses: AuxiliaryLosses) -> tuple[Tensor, Tensor]:
    share = 1 / (losses.replicas * losses.micro_batches)
    return d_x, losses.scaled(torch.full_like(loss, share)).to(loss.dtype)


_ATTACHED = differentiable(lambda x, *_: x.view_as(x), _gradients, lambda x, loss, losses, y: (loss, losses))
