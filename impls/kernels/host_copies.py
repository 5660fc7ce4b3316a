"""Operators for memory of the host, for copies over the link between host and device, and for host cores.

Allocations and copies are operators so that meters see them. On fake ranks and on real CPUs all memory has
the same torch device, and only the operator says whether a tensor is in the host's or the device's memory. On
a GPU, memory that is copied to or from is pinned (page-locked), because copies that run at the same time as
kernels need it. Memory that only the host's cores use is pageable.

Some programs read a tensor of the device element by element, with one kernel and one wait for each element.
One operator represents the whole loop, so that a trace of 64K tokens has one event and not 64K.

The host's cores compute AdamW and its sums and copies on tensors of the host's memory, also as operators,
because only the operator says who computes. The host first waits until the device has ended its copies to the
host, and work that the device gets afterwards comes later.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spbench.impls.kernels.operator import operator

#: names of the operators that make tensors in the host's pageable memory, and in any memory of the host
MAKES_PAGEABLE = ("pageable_zeros", "pageable_empty_like")
MAKES_ON_HOST = ("host_empty_like", "host_zeros", *MAKES_PAGEABLE)
#: names of the operators that copy to and from the host's pageable memory
TO_PAGEABLE, FROM_PAGEABLE = "to_pageable_", "from_pageable_"
#: names of the operators that copy between host and device; each reads its second argument
OVER_HOST_LINK = ("to_host_", "to_device_", TO_PAGEABLE, FROM_PAGEABLE)


@operator("spbench::host_empty_like", fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu"))
def host_empty_like(x: Tensor) -> Tensor:
    """An empty tensor in the host's pinned memory, of the shape and dtype of x of the device."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type != "cpu")


@operator(
    "spbench::host_zeros", fake=lambda device, shape, dtype: torch.zeros(shape, dtype=dtype, device="cpu")
)
def host_zeros(device: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in pinned memory of the host; ``device`` is any tensor of the device that will copy the zeros."""
    return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=device.device.type != "cpu")


@operator(
    "spbench::pageable_zeros", fake=lambda device, shape, dtype: torch.zeros(shape, dtype=dtype, device="cpu")
)
def pageable_zeros(device: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in pageable memory of the host."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


@operator("spbench::pageable_empty_like", fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu"))
def pageable_empty_like(x: Tensor) -> Tensor:
    """An empty tensor in the host's pageable memory, of the shape and dtype of x."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


@operator("spbench::to_host_", mutates_args=("host",))
def to_host_(host: Tensor, x: Tensor) -> None:
    """Copy x of the device into the host's memory on the current stream; the host does not wait."""
    host.copy_(x, non_blocking=True)


@operator("spbench::to_device_", mutates_args=("x",))
def to_device_(x: Tensor, host: Tensor) -> None:
    """Copy ``host`` into x of the device on the current stream; the host does not wait."""
    x.copy_(host, non_blocking=True)


@operator(f"spbench::{TO_PAGEABLE}", mutates_args=("host",))
def to_pageable_(host: Tensor, x: Tensor) -> None:
    """Copy x of the device into pageable memory of the host, as ``tensor.to("cpu")`` does; the host waits."""
    host.copy_(x)


@operator(f"spbench::{FROM_PAGEABLE}", mutates_args=("x",))
def from_pageable_(x: Tensor, host: Tensor) -> None:
    """Copy pageable memory of the host into x of the device; the host waits."""
    x.copy_(host)


#: names of the operators that represent loops in which the host reads elements
READ_BY_HOST = ("samples_begun", "read_by_host")


@operator("spbench::samples_begun", fake=lambda positions: positions.new_empty(()))
def samples_begun(positions: Tensor) -> Tensor:
    """The number of samples packed in a sequence, from its positions [L] in int64, each of which the host
    reads (get_response_lengths of prime-rl, January 2026, src/prime_rl/trainer/utils.py)."""
    count = 1
    for i in range(1, len(positions) - 1):
        if positions[i] == 0 and positions[i - 1] != 0 and positions[i + 1] == 1:
            count += 1
    return torch.tensor(count, device=positions.device)


@operator("spbench::read_by_host", fake=lambda x: torch.empty_like(x))
def read_by_host(x: Tensor) -> Tensor:
    """Returns a copy of x, a tensor of one int64 element, after the host has read the value, as a branch of
    Python does."""
    return torch.full_like(x, int(x.item()))


def read_packing(length: int, device: torch.device) -> None:
    """Run the test whether a sequence of ``length`` positions has only one sample, which Hugging Face's flash
    attention runs in each call with one sequence (_is_packed_sequence of transformers 4.56,
    modeling_flash_attention_utils.py)."""
    positions = torch.arange(length, device=device)
    read_by_host((torch.arange(length, device=device) + positions.min() - positions).abs().sum())


#: names of the operators that the host's cores compute
ON_HOST_CORES = ("host_adamw_", "host_copy_", "host_add_", "host_unscale_")
#: the defaults of torch's AdamW
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
        steps: for each weight a scalar tensor, the number of earlier steps.
        found_inf: if not 0, the step changes nothing.
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
    """Copy x into ``to``, rounded to the dtype of ``to``."""
    to.copy_(x)


@operator("spbench::host_add_", mutates_args=("to",))
def host_add_(to: Tensor, x: Tensor) -> None:
    """Add x to ``to``, both in the host's memory."""
    to.add_(x)


@operator("spbench::host_unscale_", mutates_args=("gradients", "found_inf"))
def host_unscale_(gradients: Sequence[Tensor], found_inf: Tensor, scale: Tensor) -> None:
    """Divide gradients, in place, by the scale of the loss; the scalar ``found_inf`` becomes 1 if a gradient
    is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, scale.reciprocal())
