"""What a pipeline schedule does with one stage: forward, backward, and what comes from another stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from spbench.impls.composition import Stage
from spbench.impls.strategies.base import Strategy


class StageRun:
    """Runs micro-batches through the layers of a stage.

    Args:
        module: of the stage: ``forward(inputs, hidden)`` returns a dict with ``loss`` on the last stage and
            ``hidden`` on the others; ``boundary_shape(inputs)`` is the shape of ``hidden``.
        dtype: of ``hidden``.
        frees_sent: whether to free the values of an output when it has been sent: backward needs its graph
            alone (deallocate_pipeline_outputs of Megatron-Core's pipeline_parallel/schedules.py).
    """

    def __init__(
        self, module: nn.Module, stage: Stage, strategy: Strategy, dtype: torch.dtype, *, frees_sent: bool
    ):
        self.module, self.stage, self.strategy = module, stage, strategy
        self.dtype, self.frees_sent = dtype, frees_sent

    def forward(self, inputs: Mapping[str, Tensor], x: Tensor | None) -> Tensor:
        """The loss, a scalar, or ``hidden`` for the next stage, from that of the stage before."""
        outputs = self.module(inputs) if x is None else self.module(inputs, x)
        result: Tensor = outputs["loss" if self.stage.last else "hidden"]
        return result

    def backward(
        self, x: Tensor | None, y: Tensor, gradient: Tensor | None, scaled: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """The gradient of x; None on the first stage.

        Args:
            y: what :meth:`forward` made of x.
            gradient: of y; None on the last stage, where backward starts from the ``scaled`` loss.
        """
        if gradient is None:
            scaled(y).backward()
        elif self.frees_sent:
            # torch.autograd.backward compares the shapes of y, which may have been freed, and its gradient
            Variable._execution_engine.run_backward(
                (y,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        else:
            torch.autograd.backward(y, gradient)
        return None if x is None else x.grad

    def free(self, y: Tensor) -> None:
        """Give up the values of an output that has been sent, if they are to be freed."""
        if self.frees_sent and not self.stage.last and not y._is_view():
            y.data = y.new_empty(1)

    def receive_buffer(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Memory for the hidden states that another stage sends of a micro-batch with these inputs."""
        elements = self._boundary(inputs).numel() // self.strategy.wire_parts
        return torch.empty(elements, dtype=self.dtype, device=next(iter(inputs.values())).device)

    def whole(self, inputs: Mapping[str, Tensor], received: Tensor | None) -> Tensor | None:
        """What was received, as it was on the other stage."""
        return None if received is None else self.strategy.from_wire(received, self._boundary(inputs))

    def _boundary(self, inputs: Mapping[str, Tensor]) -> torch.Size:
        return torch.Size(self.module.boundary_shape(inputs))  # type: ignore[operator]
