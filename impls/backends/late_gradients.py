"""Gradients that stay whole until backward has ended, and are then summed in a buffer, as in DeepSpeed's
ZeRO-1 without ``overlap_comm`` (runtime/zero/stage_1_and_2.py, commit c4b1a8c: ``reduce_gradients``,
``reduce_independent_p_g_buckets_and_remove_grads``).

Backward fills each parameter's ``.grad`` and sends nothing; forward has neither gradients nor a buffer. After
the last backward, gradients are copied into the buffer one after another and freed. When the next one has no
room, the buffer's content is summed, and the rank's part is taken out before the buffer is filled again. A
gradient larger than the buffer is summed where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce

#: of a parameter and its gradient, summed and flat
Take = Callable[[nn.Parameter, Tensor], None]


class LateGradients:
    """Sums gradients after backward.

    Args:
        summed: parameters in the order of registration, by the group over which to sum.
        elements: size of the buffer.
    """

    def __init__(self, summed: Iterable[tuple[dist.ProcessGroup | None, list[nn.Parameter]]], elements: int):
        self.summed, self.elements = list(summed), elements
        #: from the beginning of the last backward until the gradients are summed
        self.buffer: Tensor | None = None

    def zero(self) -> None:
        """Before a step."""
        for _, parameters in self.summed:
            for p in parameters:
                p.grad = None

    def expect_last(self) -> None:
        """Before the last backward of a step, through the model or one of its stages."""
        if self.buffer is None and self.summed:
            like = self.summed[0][1][0]
            self.buffer = torch.empty(self.elements, dtype=like.dtype, device=like.device)

    def finish(self, take: Take) -> None:
        """After the last backward: sum each gradient over its group, and give it to ``take``."""
        for group, parameters in self.summed:
            waiting: list[nn.Parameter] = []
            for p in parameters:
                if sum(x.numel() for x in (*waiting, p)) > self.elements:
                    self._sum(waiting, group, take)
                    waiting = []
                waiting.append(p)
            self._sum(waiting, group, take)
        self.buffer = None

    def _sum(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, take: Take) -> None:
        if not parameters:
            return
        sizes = [p.numel() for p in parameters]
        if sum(sizes) > self.elements:  # one that is larger than the buffer
            whole = _gradient(parameters[0])
        else:
            assert self.buffer is not None, "no backward was said to be the last"
            whole = self.buffer[: sum(sizes)]
            for p, place in zip(parameters, whole.split(sizes), strict=True):
                place.copy_(_gradient(p))
                p.grad = None
        all_reduce(whole, group)
        for p, gradient in zip(parameters, whole.split(sizes), strict=True):
            take(p, gradient)
            p.grad = None


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None, "backward gave no gradient for some parameters"
    return p.grad.flatten()
