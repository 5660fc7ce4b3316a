"""Pipeline schedules: the order in which a stage runs its micro-batches, and what it sends when.

1F1B (PipeDream-flush, Narayanan et al., arXiv 2104.04473, section 2.2.1): a stage runs ahead by as many
micro-batches as there are stages after it, then alternates one forward and one backward. GPipe (arXiv
1811.06965) runs all forwards, then all backwards. With one stage this is gradient accumulation.

torch.distributed.pipelining has these schedules too, but allocates the receive buffers of all micro-batches
before the first one, which is not what the systems that are reproduced here held in memory. Here a buffer
is made when it is received into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from spbench.impls.collectives import exchange
from spbench.impls.composition import Composition
from spbench.impls.strategies.base import Strategy

SCHEDULES = ("1f1b", "gpipe")

Phase = Callable[[str], AbstractContextManager[None]]


class Pipeline:
    """Runs the micro-batches of one step on this rank's stage.

    Args:
        module: of the stage: ``forward(inputs, hidden)`` returns a dict with ``loss`` on the last stage and
            ``hidden`` on the others; ``boundary_shape(inputs)`` is the shape of ``hidden``.
        dtype: of ``hidden``.
        schedule: one of SCHEDULES.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        around: Composition,
        dtype: torch.dtype,
        schedule: str = "1f1b",
    ):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, not {schedule!r}")
        self.module, self.strategy, self.dtype, self.schedule = module, strategy, dtype, schedule
        self.stage, self.group = around.stage, around.pp_group

    def run(
        self, micro_batches: Sequence[Mapping[str, Tensor]], scaled: Callable[[Tensor], Tensor], phase: Phase
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients are left on the parameters.

        Args:
            scaled: makes of a loss what backward starts from.
            phase: entered around each forward and each backward, with what is sent after it.

        Returns the sum of this rank's shares of the losses, detached; zero but on the last stage.
        """
        count = len(micro_batches)
        after = self.stage.count - 1 - self.stage.index
        ahead = count if self.schedule == "gpipe" else min(after, count)
        held: deque[tuple[Tensor | None, Tensor]] = deque()
        losses = []
        arrived = None  # what came with the exchange after the last backward
        for i, inputs in enumerate(micro_batches):
            with phase("forward"):
                if i <= ahead:
                    arrived = self._exchange(inputs, receive_forward=True)
                x = self._whole(inputs, arrived)
                x, arrived = None if x is None else x.requires_grad_(), None
                y = self._forward(inputs, x)
                held.append((x, y))
                if self.stage.last:
                    losses.append(y.detach())
                arrived = self._exchange(inputs, send_forward=y, receive_backward=i >= ahead)
            if i < ahead:
                continue
            with phase("backward"):
                gradient, arrived = self._whole(inputs, arrived), None
                d_x = self._backward(*held.popleft(), gradient, scaled)
                arrived = self._exchange(inputs, send_backward=d_x, receive_forward=i < count - 1)
        while held:
            inputs = micro_batches[-1]
            with phase("backward"):
                gradient = self._whole(inputs, self._exchange(inputs, receive_backward=True))
                d_x = self._backward(*held.popleft(), gradient, scaled)
                self._exchange(inputs, send_backward=d_x)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=_device_of(micro_batches[0]))

    def _forward(self, inputs: Mapping[str, Tensor], x: Tensor | None) -> Tensor:
        outputs = self.module(inputs) if x is None else self.module(inputs, x)
        result: Tensor = outputs["loss" if self.stage.last else "hidden"]
        return result

    def _backward(
        self, x: Tensor | None, y: Tensor, gradient: Tensor | None, scaled: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        if gradient is None:
            scaled(y).backward()
        else:
            torch.autograd.backward(y, gradient)
        return None if x is None else x.grad

    def _exchange(
        self,
        inputs: Mapping[str, Tensor],
        *,
        send_forward: Tensor | None = None,
        send_backward: Tensor | None = None,
        receive_forward: bool = False,
        receive_backward: bool = False,
    ) -> Tensor | None:
        """Exchange with the neighbouring stages what there is to exchange; returns what was received, as it
        was sent. The first stage has none before it and the last none after it: then there is nothing."""
        here, stage = self.stage.index, self.stage
        sends = []
        if send_forward is not None and not stage.last:
            sends.append((self.strategy.to_wire(send_forward.detach()), here + 1))
        if send_backward is not None and not stage.first:
            sends.append((self.strategy.to_wire(send_backward), here - 1))
        receives = []
        if (receive_forward and not stage.first) or (receive_backward and not stage.last):
            elements = self._boundary(inputs).numel() // self.strategy.wire_parts
            received = torch.empty(elements, dtype=self.dtype, device=_device_of(inputs))
            receives.append((received, here - 1 if receive_forward else here + 1))
        if self.group is not None:
            exchange(sends, receives, self.group)
        return receives[0][0] if receives else None

    def _whole(self, inputs: Mapping[str, Tensor], received: Tensor | None) -> Tensor | None:
        return None if received is None else self.strategy.from_wire(received, self._boundary(inputs))

    def _boundary(self, inputs: Mapping[str, Tensor]) -> torch.Size:
        return torch.Size(self.module.boundary_shape(inputs))  # type: ignore[operator]


def _device_of(inputs: Mapping[str, Tensor]) -> torch.device:
    return next(iter(inputs.values())).device
