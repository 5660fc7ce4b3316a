"""Steps of a loop that are alike: a few are run, the others are written down from the last of them.

A ring of N ranks takes N steps a layer, and nearly all of them do the same: they call the same operators on
the same shapes, post the same messages, and free what an earlier step made. So do the micro-batches of a
pipeline stage once it alternates forward and backward. :class:`RepeatedSteps` watches what a loop of
:mod:`impls.keyed_steps` writes into the meters, step by step. Where the last two steps have one key and wrote
the same, the last one is written down again for each further step of that key, and the loop goes on after
them.

"The same" is up to numbering: a step's storages and events follow those of the step before at a distance,
which is the number of storages and events of one step. Two steps count as the same where

- sizes, tags and counts are equal, births, deaths, rows and the beginnings of phases are equal at that
  distance, and what dies or is waited for is no older than the first step of the key;
- what lives at the end of one lives at the end of the other, at that distance, and so does what is posted and
  not yet waited for, and no point of a stream is held. So a loop that gathers tensors is run in full, unless
  it says in which list (:mod:`measure.trace.step_records`);
- no other loop that began in a step outlived it, and autograd recorded nothing, whose graph would be shorter,
  unless each step runs the backward of an earlier one.

What a step leaves in Python objects alone is not seen, nor what it does by the number of the step. So it is
trusted that a step depends on its key alone; a test compares the loops of each registered strategy with whole
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spbench.bench.measure.trace.event_log import EventLog
from spbench.bench.measure.trace.memory import MemoryMeter
from spbench.bench.measure.trace.meter import CommunicationMeter
from spbench.bench.measure.trace.step_records import EventRecord, MessageRecord, StepRecord, StorageRecord
from spbench.impls.keyed_steps import Key


@dataclass(eq=False)
class _Loop:
    """A loop that has begun and not ended. ``backward_within``: see :func:`keyed_steps`. ``whole``: each of
    its steps must be run."""

    backward_within: bool
    whole: bool = False

    def check_graph(self) -> None:
        """Run each step where autograd records a graph over all of them."""
        self.whole = self.whole or (torch.is_grad_enabled() and not self.backward_within)


class RepeatedSteps:
    """Chooses which steps of the loops of a trace are run, for :func:`choosing_steps`, and writes the others
    into the meters."""

    def __init__(
        self, memory: Sequence[MemoryMeter], communication: CommunicationMeter, events: EventLog | None
    ):
        self.memory, self.communication, self.events = memory, communication, events
        self._loops: list[_Loop] = []

    def __call__(self, size: int, key: Key, backward_within: bool, kept: list[Tensor]) -> Iterator[int]:
        """The steps to be run of a loop of ``size`` steps, in order; see :func:`keyed_steps`."""
        loop = _Loop(backward_within)
        loop.check_graph()
        self._loops.append(loop)
        try:
            step = 0
            while step < size:
                current, records = key(step), self._records(kept)
                while step < size and key(step) == current:
                    yield step
                    step += 1
                    if self._settled(loop, records):
                        step += self._written_on(records, step, size, key)
        finally:
            self._loops.remove(loop)

    def _records(self, kept: list[Tensor]) -> list[StepRecord]:
        program = [] if self.events is None else [EventRecord(self.events)]
        device, *others = self.memory
        storages = [StorageRecord(device, kept), *(StorageRecord(meter, []) for meter in others)]
        return [*storages, *program, MessageRecord(self.communication)]

    def _settled(self, loop: _Loop, records: Sequence[StepRecord]) -> bool:
        """Whether a step that has just ended stands for all further ones of its key."""
        began_later = self._loops[self._loops.index(loop) + 1 :]
        for other in began_later:
            other.whole = True
        loop.whole = loop.whole or bool(began_later)
        loop.check_graph()
        if loop.whole:
            return False
        for record in records:
            record.end_step()
        return all(record.repeats() for record in records)

    def _written_on(self, records: Sequence[StepRecord], step: int, size: int, key: Key) -> int:
        """Write down the steps from ``step`` on that have the key of the one before; returns how many."""
        current, end = key(step - 1), step
        while end < size and key(end) == current:
            end += 1
        for record in records:
            record.repeat(end - step)
        return end - step
