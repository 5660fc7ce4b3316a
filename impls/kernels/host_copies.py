"""Memory of the host, and copies over the link between host and device.

They are operators so that meters see them: on fake ranks and on real CPUs the host's memory is of the same
device as all else, and only the operator says which of the two a tensor is made in. On a GPU the memory that
is copied to or from is pinned (page-locked), as copies that run beside kernels must have it; what the host's
cores alone use is pageable.

A tensor of the device that the host reads element by element: for each it launches a kernel, and waits.

One operator stands for the whole loop, so that a trace of 64K tokens has one event of it and not as many.

What the host's cores compute: AdamW and what it needs, on tensors of the host's memory.

They are operators for the reason that :mod:`spbench.impls.kernels.host_copies` gives: only the operator says
who computes. The device has to have ended its copies to the host before, for which the host waits, and what
it is given afterwards comes after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spbench.impls.kernels.operator import operator

#: names of the operators that make tensors in the host's memory that is not pinned, and in any of it
MAKES_PAGEABLE = ("pageable_zeros", "pageable_empty_like")
MAKES_ON_HOST = ("host_empty_like", "host_zeros", *MAKES_PAGEABLE)
#: names of the operators that copy to and from the host's memory that is not pinned
TO_PAGEABLE, FROM_PAGEABLE = "to_pageable_", "from_pageable_"
#: names of the operators that copy between host and device, of which the second argument is what is read
OVER_HOST_LINK = ("to_host_", "to_device_", TO_PAGEABLE, FROM_PAGEABLE)


@operator("spbench::host_empty_like", fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu"))
def host_empty_like(x: Tensor) -> Tensor:
    """Room for a tensor of the device in the host's memory: of the shape and dtype of x."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type != "cpu")


@operator(
    "spbench::host_zeros", fake=lambda device, shape, dtype: torch.zeros(shape, dtype=dtype, device="cpu")
)
def host_zeros(device: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in pinned memory of the host; ``device``: any tensor of the device that will copy them."""
    return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=device.device.type != "cpu")


@operator(
    "spbench::pageable_zeros", fake=lambda device, shape, dtype: torch.zeros(shape, dtype=dtype, device="cpu")
)
def pageable_zeros(device: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory of the host that is not pinned."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


@operator("spbench::pageable_empty_like", fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu"))
def pageable_empty_like(x: Tensor) -> Tensor:
    """As :func:`host_empty_like`, in memory that is not pinned."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


@operator("spbench::to_host_", mutates_args=("host",))
def to_host_(host: Tensor, x: Tensor) -> None:
    """Copy x of the device into the host's memory; the current stream does it, and the host goes on."""
    host.copy_(x, non_blocking=True)


@operator("spbench::to_device_", mutates_args=("x",))
def to_device_(x: Tensor, host: Tensor) -> None:
    """Copy what the host's memory holds into x of the device, as :func:`to_host_` does the other way."""
    x.copy_(host, non_blocking=True)


@operator(f"spbench::{TO_PAGEABLE}", mutates_args=("host",))
def to_pageable_(host: Tensor, x: Tensor) -> None:
    """Copy x of the device into memory of the host that is not pinned, as ``tensor.to("cpu")`` does; the
    host waits."""
    host.copy_(x)


@operator(f"spbench::{FROM_PAGEABLE}", mutates_args=("x",))
def from_pageable_(x: Tensor, host: Tensor) -> None:
    """Copy what memory of the host that is not pinned holds into x of the device; the host waits."""
    x.copy_(host)


#: names of the operators that are such loops
READ_BY_HOST = ("samples_begun", "read_by_host")


@operator("spbench::samples_begun", fake=lambda positions: positions.new_empty(()))
def samples_begun(positions: Tensor) -> Tensor:
    """How many samples are packed in a sequence, by its positions [L] in int64, each read by the host:
    get_response_lengths of prime-rl, January 2026 (src/prime_rl/trainer/utils.py)."""
    count = 1
    for i in range(1, len(positions) - 1):
        if positions[i] == 0 and positions[i - 1] != 0 and positions[i + 1] == 1:
            count += 1
    return torch.tensor(count, device=positions.device)


@operator("spbench::read_by_host", fake=lambda x: torch.empty_like(x))
def read_by_host(x: Tensor) -> Tensor:
    """The value of a tensor of one element in int64, which the host reads, as a branch of Python does; again
    as a tensor."""
    return torch.full_like(x, int(x.item()))


def read_packing(length: int, device: torch.device) -> None:
    """Whether the positions of a sequence are those of one sample, as Hugging Face's flash attention asks in
    each call with one sequence (_is_packed_sequence of transformers 4.56,
    modeling_flash_attention_utils.py)."""
    positions = torch.arange(length, device=device)
    read_by_host((torch.arange(length, device=device) + positions.min() - positions).abs().sum())


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
