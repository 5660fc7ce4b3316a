"""What the host's cores compute: AdamW and what it needs, on tensors of the host's memory.

They are operators for the reason that :mod:`spbench.impls.kernels.host_copies` gives: only the operator says
who computes. The device has to have ended its copies to the host before, for which the host waits, and what
it is given afterwards comes after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spbench.impls.kernels.operator import operator

#: names of these operators
ON_HOST_CORES = ("host_adamw_", "host_copy_", "host_add_", "host_unscale_")
#: of torch's AdamW
_BETAS, _EPS = (0.9, 0.999), 1e-8


@operator("spbench::host_adamw_", mutates_args=("weights", "first_moments", "second_moments", "steps"))
def host_adamw_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: float,
    weight_decay: float,
    found_inf: Tensor | None,
) -> None:
    """A step of torch's fused AdamW (DeepSpeed's CPUAdam computes the same) on each of the weights.

    Args:
        steps: of each weight the number of steps before this one, a scalar.
        found_inf: not 0: nothing is changed.
    """
    torch._foreach_add_(list(steps), 1)
    torch._fused_adamw_(
        list(weights),
        list(gradients),
        list(first_moments),
        list(second_moments),
        [],
        list(steps),
        lr=lr,
        beta1=_BETAS[0],
        beta2=_BETAS[1],
        weight_decay=weight_decay,
        eps=_EPS,
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )
    if found_inf is not None:
        torch._foreach_sub_(list(steps), [found_inf] * len(steps))


@operator("spbench::host_copy_", mutates_args=("to",))
def host_copy_(to: Tensor, x: Tensor) -> None:
    """Copy x, rounded to the dtype of ``to``."""
    to.copy_(x)


@operator("spbench::host_add_", mutates_args=("to",))
def host_add_(to: Tensor, x: Tensor) -> None:
    """Add x to another tensor."""
    to.add_(x)


@operator("spbench::host_unscale_", mutates_args=("gradients", "found_inf"))
def host_unscale_(gradients: Sequence[Tensor], found_inf: Tensor, scale: Tensor) -> None:
    """Divide gradients by the scale of the loss; ``found_inf``, a scalar, becomes 1 where one is not
    finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, scale.reciprocal())
