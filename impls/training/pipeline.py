"""Pipeline schedules: the order in which a stage runs its micro-batches, and sends and receives tensors.

1F1B (PipeDream-flush, Narayanan et al., arXiv 2104.04473, section 2.2.1): a stage runs ahead by as many
micro-batches as there are stages after it, then alternates one forward and one backward. GPipe (arXiv
1811.06965) runs all forwards, then all backwards. With one stage both are gradient accumulation.

torch.distributed.pipelining has these schedules too, but allocates the receive buffers of all micro-batches
before the first one, which the systems that spbench reproduces did not do. This module allocates a buffer
when a tensor is received into it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from spbench.impls.backends.backend import Backend
from spbench.impls.collectives import exchange
from spbench.impls.composition import Composition, Stage
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.rings import wait_for_device
from spbench.impls.training.turns import Turns


class StageRun:
    """Runs micro-batches through the layers of a stage.

    Args:
        module: the stage's module: ``forward(inputs, hidden)`` returns a dict with ``loss`` on the last stage
            and ``hidden`` on the others, in the dtype of the weights; ``boundary_shape(inputs)`` is the shape
            of ``hidden``.
        backend: the backend of the rank's whole module.
    """

    def __init__(self, module: nn.Module, stage: Stage, backend: Backend):
        self.module, self.stage, self.backend = module, stage, backend
        self.strategy, self.dtype = backend.strategy, backend.precision.parameters
        # backward needs only the graph of an output, not its values: deallocate_pipeline_outputs of
        # Megatron-Core's pipeline_parallel/schedules.py
        self.frees_sent, self.keeps_input = backend.frees_sent_outputs, backend.keeps_stage_inputs
        self.host_waits = backend.host_waits_for_transfers
        self.reads_loss = stage.last and backend.host_reads_losses
        self.input: Tensor | None = None

    def forward(self, inputs: Mapping[str, Tensor], x: Tensor | None) -> Tensor:
        """The scalar loss on the last stage, else ``hidden``; x is ``hidden`` of the stage before."""
        self.input = x if self.keeps_input else None
        outputs = self.module(inputs) if x is None else self.module(inputs, x)
        result: Tensor = outputs["loss" if self.stage.last else "hidden"]
        if self.reads_loss:
            wait_for_device(result)
        return result

    def backward(
        self,
        x: Tensor | None,
        y: Tensor,
        gradient: Tensor | None,
        scaled: Callable[[Tensor], Tensor],
        *,
        last: bool,
    ) -> Tensor | None:
        """The gradient of x; None on the first stage.

        Args:
            y: the result of :meth:`forward` for x.
            gradient: the gradient of y; None on the last stage, where backward starts from the scaled loss.
            scaled: the function that multiplies a loss by the loss scale.
            last: whether this is the stage's last backward of the step.
        """
        if last:
            self.backend.begin_last_backward(self.module)
        if gradient is None:
            scaled(y).backward()
        elif self.frees_sent:
            # torch.autograd.backward compares the shapes of y, which may have been freed, and its gradient
            Variable._execution_engine.run_backward(
                (y,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        else:
            torch.autograd.backward(y, gradient)
        if last:
            self.backend.end_last_backward(self.module)
        return None if x is None else x.grad

    def free(self, y: Tensor) -> None:
        """Free the values of an output that has been sent, if the backend frees such outputs."""
        if self.frees_sent and not self.stage.last and not y._is_view():
            y.data = y.new_empty(1)

    def receive_buffer(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """New memory for this rank's part of another stage's hidden states, for these inputs."""
        elements = self._boundary(inputs).numel() // self.strategy.wire_parts
        return torch.empty(elements, dtype=self.dtype, device=next(iter(inputs.values())).device)

    def whole(self, inputs: Mapping[str, Tensor], received: Tensor | None) -> Tensor | None:
        """Another stage's hidden states, from the part that this rank received; None if it received none."""
        return None if received is None else self.strategy.from_wire(received, self._boundary(inputs))

    def _boundary(self, inputs: Mapping[str, Tensor]) -> torch.Size:
        return torch.Size(self.module.boundary_shape(inputs))  # type: ignore[operator]


Inputs = Mapping[str, Tensor]
Phase = Callable[[str], AbstractContextManager[None]]


class Pipeline:
    """Runs the micro-batches of one step on this rank's stage.

    Args:
        run: the run of this rank's stage.
        turns: the order of this rank's forwards and backwards in a step.
    """

    def __init__(self, run: StageRun, around: Composition, turns: Turns):
        self.of_stage, self.turns = run, turns
        self.stage, self.group = around.stage, around.pp_group

    def run(
        self, micro_batches: Sequence[Inputs], scaled: Callable[[Tensor], Tensor], phase: Phase
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients are left on the parameters.

        Args:
            scaled: the function that multiplies a loss by the loss scale, before backward.
            phase: context entered around each forward and backward with the messages after it.

        Returns the sum of this rank's shares of the losses, detached; zero but on the last stage.
        """
        stage, count, ahead = self.of_stage, self.turns.micro_batches, self.turns.ahead
        held: deque[tuple[Tensor | None, Tensor]] = deque()
        losses: list[Tensor] = []
        arrived = None  # the tensor received in the last exchange
        # the first backward allocates gradients to which others add; no micro-batch follows the last one
        steps = keyed_steps(
            count,
            lambda i: (i < ahead, i == 0, i == ahead, i == count - 1, stage.backend.kind_of_backward(i)),
            backward_within=True,
            kept=losses,
        )
        for i in steps:
            inputs = micro_batches[i]
            with phase("forward"):
                if i <= ahead:
                    arrived = self._exchange(inputs, receive_forward=True)
                x = stage.whole(inputs, arrived)
                x, arrived = None if x is None else x.requires_grad_(), None
                y = stage.forward(inputs, x)
                held.append((x, y))
                if self.stage.last:
                    losses.append(y.detach())
                arrived = self._exchange(inputs, send_forward=y, receive_backward=i >= ahead)
                stage.free(y)
            if i < ahead:
                continue
            with phase("backward"):
                gradient, arrived = stage.whole(inputs, arrived), None
                d_x = stage.backward(*held.popleft(), gradient, scaled, last=i - ahead == count - 1)
                arrived = self._exchange(inputs, send_backward=d_x, receive_forward=i < count - 1)
        while held:
            inputs = micro_batches[-1]
            with phase("backward"):
                gradient = stage.whole(inputs, self._exchange(inputs, receive_backward=True))
                d_x = stage.backward(*held.popleft(), gradient, scaled, last=not held)
                self._exchange(inputs, send_backward=d_x)
        losses += losses[-1:] * (len(micro_batches) - count)  # of the micro-batches that a trace leaves out
        return summed(losses, micro_batches)

    def _exchange(
        self,
        inputs: Inputs,
        *,
        send_forward: Tensor | None = None,
        send_backward: Tensor | None = None,
        receive_forward: bool = False,
        receive_backward: bool = False,
    ) -> Tensor | None:
        """Send to and receive from the neighbouring stages; returns the received tensor in the form of
        :meth:`Strategy.to_wire`, or None. The first stage has no neighbour before, the last none after."""
        here, stage, strategy = self.stage.index, self.stage, self.of_stage.strategy
        sends = []
        if send_forward is not None and not stage.last:
            sends.append((strategy.to_wire(send_forward.detach()), here + 1))
        if send_backward is not None and not stage.first:
            sends.append((strategy.to_wire(send_backward), here - 1))
        receives = []
        if (receive_forward and not stage.first) or (receive_backward and not stage.last):
            received = self.of_stage.receive_buffer(inputs)
            receives.append((received, here - 1 if receive_forward else here + 1))
        if self.group is not None:
            exchange(sends, receives, self.group, host_waits=self.of_stage.host_waits)
        return receives[0][0] if receives else None


def summed(losses: Sequence[Tensor], micro_batches: Sequence[Inputs]) -> Tensor:
    """The sum [] of scalar losses; if there are none, zero on the device of the inputs."""
    if losses:
        return torch.stack(list(losses)).sum()
    return torch.zeros((), device=next(iter(micro_batches[0].values())).device)
