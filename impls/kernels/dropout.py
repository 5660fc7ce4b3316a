"""Dropout with an explicit mask, by itself or fused with bias and residual (Megatron-LM's bias_dropout_add),
and random numbers for dropout that a parallel run can control.

Every dropout of a step has a number. Its generator is seeded from (seed, step, number) and, where the tensor
is spread over ranks, from the rank too. So replicated tensors get the same mask on all ranks of a group, and
spread tensors get different masks. Recomputation in activation checkpointing sets the number back, and so
repeats the same mask.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from spbench.impls.kernels.operator import differentiable, operator
from spbench.impls.place import ALONE, Place


@operator("spbench::masked_scale", fake=lambda x, mask, scale: torch.empty_like(x))
def masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns x times ``scale`` where the boolean ``mask`` is True, and zero elsewhere."""
    return (x * mask).mul_(scale)


_MASKED_DROPOUT = differentiable(masked_scale, masked_scale, lambda x, mask, scale, y: (mask, scale))


def masked_dropout(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Returns x after dropout of probability p by a boolean mask (True: kept) in the shape of x."""
    return _MASKED_DROPOUT(x, mask, 1 / (1 - p))


@operator("spbench::bias_dropout_add", fake=lambda x, bias, residual, mask, scale: torch.empty_like(residual))
def _bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (x + bias).mul_(mask).mul_(scale).add_(residual)


def _gradients(gradient: Tensor, mask: Tensor, scale: float, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_x = masked_scale(gradient, mask, scale)
    return d_x, d_x.flatten(0, -2).sum(0), gradient


_BIAS_DROPOUT_ADD = {
    True: differentiable(_bias_dropout_add, _gradients, lambda x, b, r, mask, scale, y: (mask, scale, x)),
    False: differentiable(_bias_dropout_add, _gradients, lambda x, b, r, mask, scale, y: (mask, scale)),
}


def bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, mask: Tensor, p: float, *, keep_input: bool = False
) -> Tensor:
    """residual + dropout(x + bias) for x, residual [..., H] and bias [H]; keeps the mask.

    ``keep_input`` keeps x too, although backward does not need x, because TorchScript's autodiff of this
    function in PyTorch 1.7 and 1.8 captured dropout's input as a dead value (pytorch issue 45524): 2 bytes an
    element in addition to the mask's 1.
    """
    return _BIAS_DROPOUT_ADD[keep_input](x, bias, residual, mask, 1 / (1 - p))


class DropoutRandom:
    """The numbered dropout calls of one rank.

    Args:
        seed: the seed of the whole run, the same on all ranks.
        place: the place of this rank on the mesh.
    """

    def __init__(self, seed: int, place: Place = ALONE):
        self.seed, self.place = seed, place
        self.step = 0
        self.number = 0

    def begin_step(self, step: int) -> None:
        """Number the dropout calls of training step ``step`` from zero."""
        self.step, self.number = step, 0

    def mask(self, x: Tensor, p: float, axes: Sequence[str]) -> Tensor:
        """Returns a boolean tensor in the shape of x, True (kept) with probability 1 - p.

        Args:
            axes: the axes of the mesh over whose ranks x is spread, so that each rank draws another mask;
                without axes, the mask is the same on all ranks.
        """
        generator = torch.Generator(device=x.device).manual_seed(self.next_seed(axes))
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)

    def next_seed(self, axes: Sequence[str]) -> int:
        """Returns the seed of the next dropout, and counts it; ``axes`` are as in :meth:`mask`."""
        rank = self.place.rank(*axes) + 1 if axes else 0
        seed = zlib.crc32(repr((self.seed, self.step, self.number, rank)).encode())
        self.number += 1
        return seed

    def dropout(self, x: Tensor, p: float, axes: Sequence[str]) -> Tensor:
        """Returns x with elements set to zero with probability p and the others scaled by 1 / (1 - p); keeps
        a byte an element. ``axes`` are as in :meth:`mask`."""
        return x if p == 0 else masked_dropout(x, self.mask(x, p, axes), p)
