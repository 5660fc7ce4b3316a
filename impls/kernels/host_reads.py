"""A tensor of the device that the host reads element by element: for each it launches a kernel, and waits.

One operator stands for the whole loop, so that a trace of 64K tokens has one event of it and not as many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spbench.impls.kernels.operator import operator

#: names of the operators that are such loops
READ_BY_HOST = ("samples_begun", "read_by_host")


@operator("spbench::samples_begun")
def samples_begun(positions: Tensor) -> Tensor:
    """How many samples are packed in a sequence, by its positions [L] in int64, each read by the host:
    get_response_lengths of prime-rl, January 2026 (src/prime_rl/trainer/utils.py)."""
    count = 1
    for i in range(1, len(positions) - 1):
        if positions[i] == 0 and positions[i - 1] != 0 and positions[i + 1] == 1:
            count += 1
    return torch.tensor(count, device=positions.device)


@samples_begun.register_fake
def _(positions: Tensor) -> Tensor:
    return positions.new_empty(())


@operator("spbench::read_by_host")
def read_by_host(x: Tensor) -> Tensor:
    """The value of a tensor of one element in int64, which the host reads, as a branch of Python does; again
    as a tensor."""
    return torch.full_like(x, int(x.item()))


@read_by_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def read_packing(length: int, device: torch.device) -> None:
    """Whether the positions of a sequence are those of one sample, as Hugging Face's flash attention asks in
    each call with one sequence (_is_packed_sequence of transformers 4.56,
    modeling_flash_attention_utils.py)."""
    positions = torch.arange(length, device=device)
    read_by_host((torch.arange(length, device=device) + positions.min() - positions).abs().sum())
