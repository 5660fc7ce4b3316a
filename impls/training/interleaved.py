"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.2), as Megatron-LM runs it.

A rank holds several runs of layers, its chunks; a micro-batch passes through all ranks once for each chunk,
in the order of :mod:`spbench.impls.training.turns`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import begin_exchange, exchange
from spbench.impls.composition import Composition
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.training.pipeline import Inputs, Phase, StageRun, summed
from spbench.impls.training.turns import Action, Turn, Turns

#: a tensor that is being received, and the work to wait for before it may be read
_Arriving = tuple[Tensor, dist.Work | None]


class InterleavedPipeline:
    """Runs the micro-batches of one step on this rank's stages.

    Args:
        runs: the runs of this rank's stages, in the order of their layers.
        turns: the order of this rank's forwards and backwards in a step.
    """

    def __init__(self, runs: Sequence[StageRun], around: Composition, turns: Turns):
        self.runs, self.group, self.turns = runs, around.pp_group, turns
        self.rank, self.ranks = around.stage.index, around.stage.count

    def run(
        self, micro_batches: Sequence[Inputs], scaled: Callable[[Tensor], Tensor], phase: Phase
    ) -> Tensor:
        """Run a step's micro-batches and return its loss; the arguments are those of :meth:`Pipeline.run`."""
        step = _Step(self, micro_batches, scaled, phase)
        step.begin_gathering(*range(min(2, self.turns.chunks)))
        step.take(self.turns.warm_up())
        ahead, period = self.turns.ahead, self.turns.period
        # all periods do the same, except the first, which allocates the gradients to which others add, and
        # those that put off gradients of the head
        kind, group = self.runs[0].backend.kind_of_backward, self.turns.group
        periods = keyed_steps(
            self.turns.periods, lambda i: kind(i * group), backward_within=True, kept=step.losses
        )
        for i in periods:
            step.alternate(range(ahead + i * period, ahead + (i + 1) * period))
        step.alternate(range(ahead + self.turns.periods * period, len(self.turns)))
        step.take(self.turns.cool_down())
        # the losses of the micro-batches that a trace leaves out
        step.losses += step.losses[-1:] * (len(micro_batches) - self.turns.micro_batches)
        return summed(step.losses, micro_batches)


class _Step:
    """A step of an :class:`InterleavedPipeline`: its actions, and the tensors held between actions."""

    def __init__(
        self,
        pipeline: InterleavedPipeline,
        micro_batches: Sequence[Inputs],
        scaled: Callable[[Tensor], Tensor],
        phase: Phase,
    ):
        self.pipeline, self.micro_batches, self.scaled, self.phase = pipeline, micro_batches, scaled, phase
        self.turns = pipeline.turns
        #: for each chunk, (input, output) of the micro-batches whose backward is to come
        self.held: list[deque[tuple[Tensor | None, Tensor]]] = [deque() for _ in pipeline.runs]
        self.losses: list[Tensor] = []
        #: the tensors for which turns wait, by the number of the turn
        self.inputs: dict[int, _Arriving] = {}
        self.gradients: dict[int, _Arriving] = {}
        #: the number of the next forward while forwards and backwards alternate
        self.next = self.turns.ahead
        #: the works of a gradient that is being sent
        self.sending: list[dist.Work] = []
        # each lives until the next one, as in Megatron-Core's loop; x only if it was not received ahead
        self.x: Tensor | None = None
        self.y: Tensor | None = None
        self.d_x: Tensor | None = None

    def take(self, actions: Iterable[Action]) -> None:
        """Run these actions, each a method of this class with a number, one after another."""
        for action, number in actions:
            getattr(self, action)(number)

    def alternate(self, forwards: range) -> None:
        """Run the forwards of these numbers, each with the backward after it; forwards before them that have
        not been run are left out."""
        left_out = forwards.start - self.next
        self.inputs, self.gradients = _later(self.inputs, left_out), _later(self.gradients, left_out)
        self.take(self.turns.alternating(forwards))
        self.next = forwards.stop

    def begin_gathering(self, *chunks: int) -> None:
        """Let the backend begin to gather the weights of the chunks of these numbers."""
        with self.phase("forward"):
            for chunk in chunks:
                run = self.pipeline.runs[chunk]
                run.backend.begin_gathering(run.module)

    def forward(self, number: int) -> None:
        """Run the forward of turn ``number``."""
        turn, gathered = self.turns.forwards[number], self.turns.gathered(number)
        if gathered is not None:
            self.begin_gathering(gathered)
        stage, inputs = self._at(turn)
        with self.phase("forward"):
            _, posted = self.inputs.get(number, (None, None))
            x = stage.whole(inputs, _arrived(self.inputs, number))
            x = None if x is None else x.requires_grad_()
            if stage.keeps_input and x is not None and posted is None:
                self.x = x
            y = stage.forward(inputs, x)
        self.held[turn.chunk].append((x, y))
        if stage.stage.last:
            self.losses.append(y.detach())
        self.y = y

    def backward(self, number: int) -> None:
        """Run the backward of turn ``number``."""
        self.d_x = self._backward(self.turns.backwards[number], number)

    def _backward(self, turn: Turn, number: int) -> Tensor | None:
        stage, inputs = self._at(turn)
        with self.phase("backward"):
            gradient = stage.whole(inputs, _arrived(self.gradients, number))
            last = turn.micro_batch == self.turns.micro_batches - 1
            return stage.backward(*self.held[turn.chunk].popleft(), gradient, self.scaled, last=last)

    def pass_on(self, number: int) -> None:
        """Send the output of a forward to the next rank, and receive the input of a later one."""
        send = None
        with self.phase("forward"):
            if number >= 0 and not self._at(self.turns.forwards[number])[0].stage.last:
                assert self.y is not None
                send = self.y.detach()
            posted = self.turns.posted("pass_on", number)
            for work in self._exchange(send, ("pass_on", number), self.inputs, to=1, posted=posted):
                work.wait()  # because the output is freed soon
        if number >= 0 and not posted:
            self.free(number)

    def free(self, number: int) -> None:
        """Free the output of forward ``number``, which has been sent."""
        assert self.y is not None
        self._at(self.turns.forwards[number])[0].free(self.y)

    def pass_back(self, number: int) -> None:
        """Send the gradient of a backward to the rank before, and receive the gradient for a later one."""
        with self.phase("backward"):
            posted, before = self.turns.posted("pass_back", number), self.sending
            send = self.d_x if number >= 0 else None
            self.sending = self._exchange(send, ("pass_back", number), self.gradients, to=-1, posted=posted)
            for work in before:
                work.wait()

    def _at(self, turn: Turn) -> tuple[StageRun, Inputs]:
        return self.pipeline.runs[turn.chunk], self.micro_batches[turn.micro_batch]

    def _exchange(
        self, sent: Tensor | None, action: Action, arriving: dict[int, _Arriving], *, to: int, posted: bool
    ) -> list[dist.Work]:
        """Send a tensor to the next rank (``to`` 1) or the rank before (-1), and receive from the other of
        both the tensor that the action needs; returns the works of sends that are under way."""
        pipeline, number = self.pipeline, self.turns.received(*action)
        assert pipeline.group is not None
        turns = self.turns.forwards if to > 0 else self.turns.backwards
        peers = [(pipeline.rank + step) % pipeline.ranks for step in (to, -to)]
        receives = []
        if number is not None:
            stage, inputs = self._at(turns[number])
            receives.append((stage.receive_buffer(inputs), peers[1]))
        sends = [] if sent is None else [(pipeline.runs[0].strategy.to_wire(sent), peers[0])]
        works: list[dist.Work] = []
        if posted:
            works = begin_exchange(sends, receives, pipeline.group)
        else:
            exchange(sends, receives, pipeline.group, host_waits=pipeline.runs[0].host_waits)
        if number is not None:
            arriving[number] = receives[0][0], works.pop() if posted else None
        return works


def _later(arriving: dict[int, _Arriving], turns: int) -> dict[int, _Arriving]:
    """``arriving`` with each number ``turns`` later. A function, because a name would keep tensors alive."""
    return {number + turns: each for number, each in arriving.items()} if turns else arriving


def _arrived(arriving: dict[int, _Arriving], number: int) -> Tensor | None:
    """The tensor received for turn ``number``, after waiting for it; None: none was to be received."""
    received, work = arriving.pop(number, (None, None))
    if work is not None:
        work.wait()
    return received
