"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.2), as Megatron-LM schedules it.

A rank holds several runs of layers, its chunks; a micro-batch passes through all ranks once for each. As
many micro-batches as there are ranks pass through a chunk, then as many through the next; backward takes the
chunks the other way. A rank runs ahead of its first backward by 2 forwards for each rank after it, and by one
for each rank and each chunk but one, then alternates. What a forward and the backward after it have made is
sent when both are done, as Megatron-LM does with --no-overlap-p2p-communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from spbench.impls.collectives import exchange
from spbench.impls.composition import Composition, Stage
from spbench.impls.training.pipeline import Inputs, Phase, StageRun, summed


@dataclass(frozen=True)
class Turn:
    """A forward or a backward of a micro-batch through one of a rank's chunks."""

    micro_batch: int
    chunk: int


def forward_turns(ranks: int, chunks: int, micro_batches: int) -> list[Turn]:
    """The forwards of a rank in their order; ``ranks`` divides ``micro_batches``."""
    groups = range(0, micro_batches, ranks)
    return [Turn(first + i, chunk) for first in groups for chunk in range(chunks) for i in range(ranks)]


def backward_turns(ranks: int, chunks: int, micro_batches: int) -> list[Turn]:
    """The backwards of a rank in their order."""
    turns = forward_turns(ranks, chunks, micro_batches)
    return [Turn(turn.micro_batch, chunks - 1 - turn.chunk) for turn in turns]


def turns_ahead(rank: int, ranks: int, chunks: int, micro_batches: int) -> int:
    """How many forwards a rank of the pipeline runs before its first backward follows on a forward."""
    return min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, chunks * micro_batches)


class InterleavedPipeline:
    """Runs the micro-batches of one step on this rank's stages.

    Args:
        runs: of the stages, in the order of their layers.
    """

    def __init__(self, runs: Sequence[StageRun], around: Composition):
        self.runs, self.group = runs, around.pp_group
        self.rank, self.ranks = around.stage.index, around.stage.count

    def run(
        self, micro_batches: Sequence[Inputs], scaled: Callable[[Tensor], Tensor], phase: Phase
    ) -> Tensor:
        """As :meth:`Pipeline.run`."""
        step = _Step(self, micro_batches, scaled, phase)
        count = len(step.forwards)
        ahead = turns_ahead(self.rank, self.ranks, len(self.runs), len(micro_batches))
        step.pass_on(None, -1)
        for i in range(ahead):
            step.pass_on(step.forward(i), i)
        step.pass_back(None, -1)
        for i in range(ahead, count):
            y = step.forward(i)
            # lives until the next one, as in Megatron-Core's loop
            d_x = step.backward(i - ahead)
            step.pass_on(y, i)
            step.pass_back(d_x, i - ahead)
        for i in range(count - ahead, count):
            d_x = step.backward(i)
            step.pass_back(d_x, i)
        return summed(step.losses, micro_batches)


class _Step:
    """A step of an :class:`InterleavedPipeline`: its turns by number, and what is held between them."""

    def __init__(
        self,
        pipeline: InterleavedPipeline,
        micro_batches: Sequence[Inputs],
        scaled: Callable[[Tensor], Tensor],
        phase: Phase,
    ):
        self.pipeline, self.micro_batches, self.scaled, self.phase = pipeline, micro_batches, scaled, phase
        sizes = (pipeline.ranks, len(pipeline.runs), len(micro_batches))
        self.forwards, self.backwards = forward_turns(*sizes), backward_turns(*sizes)
        #: of each chunk, inputs and outputs of the micro-batches whose backward is to come
        self.held: list[deque[tuple[Tensor | None, Tensor]]] = [deque() for _ in pipeline.runs]
        self.losses: list[Tensor] = []
        self.received: Tensor | None = None
        self.received_gradient: Tensor | None = None

    def forward(self, number: int) -> Tensor:
        """The output of the forward of that number."""
        stage, inputs = self._at(self.forwards[number])
        with self.phase("forward"):
            x = stage.whole(inputs, self.received)
            x, self.received = None if x is None else x.requires_grad_(), None
            y = stage.forward(inputs, x)
        self.held[self.forwards[number].chunk].append((x, y))
        if stage.stage.last:
            self.losses.append(y.detach())
        return y

    def backward(self, number: int) -> Tensor | None:
        """The gradient of the input of the backward of that number; None on the model's first stage."""
        stage, inputs = self._at(self.backwards[number])
        with self.phase("backward"):
            gradient, self.received_gradient = stage.whole(inputs, self.received_gradient), None
            held = self.held[self.backwards[number].chunk]
            return stage.backward(*held.popleft(), gradient, self.scaled)

    def pass_on(self, y: Tensor | None, number: int) -> None:
        """Send the output of a forward to the next rank, and receive the input of the forward after it."""
        with self.phase("forward"):
            send = None
            if y is not None and not self._at(self.forwards[number])[0].stage.last:
                send = y.detach()
            follows = self._receiving(self.forwards, number + 1, lambda stage: not stage.first)
            self.received = self._exchange(send, follows, to=1)
            if y is not None:
                self._at(self.forwards[number])[0].free(y)

    def pass_back(self, d_x: Tensor | None, number: int) -> None:
        """Send the gradient that a backward has made to the rank before, and receive that of the next."""
        with self.phase("backward"):
            follows = self._receiving(self.backwards, number + 1, lambda stage: not stage.last)
            self.received_gradient = self._exchange(d_x, follows, to=-1)

    def _at(self, turn: Turn) -> tuple[StageRun, Inputs]:
        return self.pipeline.runs[turn.chunk], self.micro_batches[turn.micro_batch]

    def _receiving(
        self, turns: Sequence[Turn], number: int, receives: Callable[[Stage], bool]
    ) -> Tensor | None:
        """Where to receive what the turn of that number needs of another rank; None if it needs nothing."""
        if number == len(turns):
            return None
        stage, inputs = self._at(turns[number])
        return stage.receive_buffer(inputs) if receives(stage.stage) else None

    def _exchange(self, sent: Tensor | None, received: Tensor | None, to: int) -> Tensor | None:
        """Send to the next rank (``to`` 1) or the one before (-1), and receive from the other of these.

        Returns what was received.
        """
        pipeline = self.pipeline
        assert pipeline.group is not None
        peers = [(pipeline.rank + step) % pipeline.ranks for step in (to, -to)]
        wire = pipeline.runs[0].strategy.to_wire
        sends = [] if sent is None else [(wire(sent), peers[0])]
        receives = [] if received is None else [(received, peers[1])]
        exchange(sends, receives, pipeline.group, host_waits=pipeline.runs[0].host_waits)
        return received
