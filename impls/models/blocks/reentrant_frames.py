"""What torch's reentrant checkpoint holds on the device while it runs a layer backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class BackwardFrame:
    """A block [B, L, H] -> [B, L, H] that is recomputed, with the tensors of a reentrant checkpoint's frame.

    ``CheckpointFunction.backward`` (torch/utils/checkpoint.py, use_reentrant=True, the default of Hugging
    Face's ``gradient_checkpointing_enable``; ArcticTraining's ``CheckpointFunctionWithCPUOffload`` is a copy)
    has the block's input, its output, made again, and the gradient of that as local variables, and runs
    ``torch.autograd.backward`` of the block inside. So all three live until the gradient of the input is
    there. Without reentrance autograd frees each after its last use, and the output at once.

    The block runs as without reentrance, for fully_shard's hooks gather weights once more in a graph inside
    another, which DeepSpeed's do not; only what is held is the reentrant one's. Gradients are the same.
    """

    def __init__(self, block: Callable[..., Tensor]):
        self.block = block
        #: of this backward
        self.held: list[Tensor] = []
        self._runs = 0

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        self._runs += 1
        y: Tensor = _Opens.apply(self.block(_Closes.apply(x, self), *others), self)
        if self._runs > 1:  # in backward
            self.held += (x.detach(), y.detach())
        return y


class _Opens(torch.autograd.Function):
    """Where backward enters the block: the gradient of its output is held from here on."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, frame: BackwardFrame) -> Tensor:
        ctx.frame = frame
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        ctx.frame.held.append(d_y)
        return d_y, None


class _Closes(torch.autograd.Function):
    """Where backward leaves the block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frame: BackwardFrame) -> Tensor:
        ctx.frame = frame
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        ctx.frame.held.clear()
        return d_x, None
