"""What torch's reentrant checkpoint holds on the device while it runs a layer backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class BackwardFrame:
    """A block [B, L, H] -> [B, L, H], or several of these, that is recomputed, with the tensors of a
    reentrant checkpoint's frame.

    ``CheckpointFunction.backward`` (torch/utils/checkpoint.py, use_reentrant=True, the default of Hugging
    Face's ``gradient_checkpointing_enable``; ArcticTraining's ``CheckpointFunctionWithCPUOffload`` is a copy)
    has the block's input, its output, made again, and the gradient of that as local variables, and runs
    ``torch.autograd.backward`` of the block inside. So all three live until the gradient of the input is
    there. Without reentrance autograd frees each after its last use, and the output at once.

    The block runs as without reentrance, for fully_shard's hooks gather weights once more in a graph inside
    another, which DeepSpeed's do not; only what is held is the reentrant one's. Gradients are the same.
    """

    def __init__(self, block: Callable[..., Any]):
        self.block = block
        #: of this backward
        self.held: list[Tensor] = []
        self._runs = 0

    def __call__(self, x: Tensor, *others: Any) -> Any:
        self._runs += 1
        x = x.view_as(x)  # its gradient is that of this use alone
        y = self.block(x, *others)
        results = y if isinstance(y, tuple) else (y,)
        if self._runs > 1:  # in backward, whose graph is that of the first run
            self.held += (x.detach(), *(each.detach() for each in results))
        elif x.requires_grad:
            for each in results:
                each.register_hook(self.held.append)
            x.register_hook(lambda _: self.held.clear())
        return y
