"""A way to trace less: a few like steps of a loop are run, and the others are written down as copies.

A ring of N ranks takes N steps a layer, and nearly all steps call the same operators on the same shapes, post
the same messages, and free the tensors that an earlier step made. So do the micro-batches of a pipeline stage
once it alternates forward and backward. :class:`RepeatedSteps` watches the records that a loop of
:mod:`impls.keyed_steps` writes into the meters. If the last two steps have the same key and wrote the same
records, the last step is written down again for each further step of that key, and the loop continues after
them.

The numbers of a step's storages and events are larger than those of the step before by a distance: the number
of storages and events of one step. Two steps count as the same if

- sizes, tags and counts are equal; births, deaths, rows and the beginnings of phases are equal at that
  distance; and storages that die and events that are awaited are no older than the first step of the key;
- storages that are alive after one step are alive after the other, at that distance, and so are posts without
  a wait; and no record of a stream is held. So a loop that gathers tensors is run in full, unless the loop
  names the list that holds them (:mod:`measure.trace.step_records`);
- no other loop that began in a step outlived the step, and autograd recorded no graph, unless each step runs
  the backward of an earlier step.

The state that a step leaves only in Python objects is not seen, nor is its dependence on its number. So a
step is assumed to depend only on its key; a test compares the loops of each registered strategy with whole
loops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spbench.bench.measure.trace.event_log import EventLog
from spbench.bench.measure.trace.memory import MemoryMeter
from spbench.bench.measure.trace.meter import CommunicationMeter
from spbench.bench.measure.trace.step_records import EventRecord, MessageRecord, StepRecord, StorageRecord
from spbench.impls import Key


@dataclass(eq=False)
class _Loop:
    """A loop that has begun and not ended. ``backward_within``: see :func:`keyed_steps`. ``whole``: whether
    each step of the loop must be run."""

    backward_within: bool
    whole: bool = False

    def check_graph(self) -> None:
        """Set ``whole`` if autograd records a graph over all steps of the loop."""
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
        """Yield, in order, the numbers of a loop's ``size`` steps that must be run (:func:`keyed_steps`)."""
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
        """Whether the step that has just ended can be copied for all further steps with its key."""
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
        """Write down the steps from ``step`` on with the key of the step before; returns their number."""
        current, end = key(step - 1), step
        while end < size and key(end) == current:
            end += 1
        for record in records:
            record.repeat(end - step)
        return end - step
