"""AdamW with moments in half precision, on float32 main weights, as TransformerEngine's FusedAdam
(pytorch/optimizers/fused_adam.py; --use-precision-aware-optimizer of Megatron-Core).

The kernel computes in float32, and rounds the moments where it writes them (TransformerEngine since commit
459e7cf; before, the step made float32 copies of all moments).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.kernels.operator import operator

_MOMENTS = ("exp_avg", "exp_avg_sq")


@operator("spbench::_fused_adamw_narrow_", mutates_args={"weights", "means", "squares"})
def _update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    count: int,
    settings: Sequence[float],
) -> None:
    """Update each weight and its moments; ``count``: of this update, from 1 on; ``settings``: learning rate,
    the betas, epsilon, decay."""
    lr, beta1, beta2, eps, decay = settings
    for weight, gradient, mean, square in zip(weights, gradients, means, squares, strict=True):
        m = mean.to(weight.dtype).lerp_(gradient, 1 - beta1)
        v = square.to(weight.dtype).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (v / (1 - beta2**count)).sqrt_().add_(eps)
        weight.mul_(1 - lr * decay).addcdiv_(m, root, value=-lr / (1 - beta1**count))
        mean.copy_(m)
        square.copy_(v)


@_update.register_fake
def _(*_: Any) -> None:
    return None


class NarrowMoments(Optimizer):
    """AdamW whose moments have that ``dtype``."""

    def __init__(
        self, parameters: Sequence[Tensor], precision: Precision, dtype: torch.dtype, **settings: Any
    ):
        self.dtype, kept = dtype, settings.pop("with_moments")
        super().__init__(parameters, precision, with_moments=False, **settings)
        if kept:
            self._make_moments()

    def _make_moments(self) -> None:
        for p in self.masters:
            if not self.adam.state[p]:
                self.adam.state[p] = {name: torch.zeros_like(p, dtype=self.dtype) for name in _MOMENTS}

    @torch.no_grad()
    def update(self) -> None:
        self._make_moments()
        self.updates += 1
        group = self.adam.param_groups[0]
        means, squares = ([self.adam.state[p][name] for p in self.masters] for name in _MOMENTS)
        settings = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        _update(list(self.masters), self.gradients(), means, squares, self.updates, settings)
