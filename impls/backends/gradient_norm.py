"""The norm of all gradients of a step over all ranks, and gradients scaled down to a largest norm, as
megatron/core/optimizer/clip_grads.py of NVIDIA/Megatron-LM (commit d98e8a64)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import all_reduce
from spbench.impls.kernels.gradient_norm import sum_of_squares
from spbench.impls.layout import is_expert, shard_of
from spbench.impls.place import Place
from spbench.impls.rings import wait_for_device
from spbench.impls.traffic import Traffic

#: added to a norm before something is divided by it
_EPSILON = 1e-6


class ClippedGradients:
    """Scales gradients so that their norm over all ranks is at most ``largest``.

    A rank holds some elements of some gradients, and other ranks may hold the same ones. So those of each
    tensor count by a share, 1 / the number of ranks of the stage that hold them.

    Args:
        shares: of each gradient, in the order of :meth:`clip`'s.
    """

    def __init__(self, place: Place, largest: float, shares: Sequence[float]):
        self.largest, self.shares = largest, list(shares)
        self.groups: list[dist.ProcessGroup | None] = [
            place.group(*place.stage_axes),
            place.group("pp"),
        ]
        #: of the last step, before it was scaled
        self.norm: Tensor | None = None

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor], scale: Tensor | None = None) -> None:
        """Scale the gradients in place.

        Args:
            scale: of the loss, by which gradients are still multiplied; None: they are not.
        """
        squares = sum_of_squares(gradients, self.shares)
        for group in self.groups:
            all_reduce(squares, group)
        self.norm = squares.sqrt_() if scale is None else squares.sqrt_() / scale
        wait_for_device(self.norm)
        coefficient = (self.largest / (self.norm + _EPSILON)).clamp_(max=1.0)
        torch._foreach_mul_([*gradients], coefficient)


def held_share(p: Tensor, place: Place, sharing: int) -> float:
    """1 / the number of ranks of a pipeline stage that hold the same elements of a parameter's gradient.

    Args:
        sharing: ranks among which the part of a rank of the strategy is shared out.
    """
    shard = shard_of(p)
    parts = sharing * (shard.parts if shard else 1) * (place.size("ep") if is_expert(p) else 1)
    return parts / place.size(*place.stage_axes)


def norm_traffic(place: Place, element_bytes: int) -> list[Traffic]:
    """The closed form of what :class:`ClippedGradients` sends.

    Args:
        element_bytes: of an element of the weights.
    """
    nbytes = max(4, element_bytes)
    return [
        Traffic("optimizer", purpose, "all_reduce", 1, nbytes, tuple(axes))
        for purpose, axes in (("norm over a stage", place.stage_axes), ("norm over stages", ["pp"]))
        if axes and place.size(*axes) > 1
    ]
