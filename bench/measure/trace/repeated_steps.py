"""Two ways to trace less: like steps of a loop are not all run, and tensors are not cut into pieces.

A few like steps of a loop are run, and the others are written down as copies of the last one. A ring of N
ranks takes N steps a layer, and nearly all steps call the same operators on the same shapes, post the same
messages, and free the tensors that an earlier step made. So do the micro-batches of a pipeline stage once it
alternates forward and backward. :class:`RepeatedSteps` watches the records that a loop of
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

The pieces of a fake tensor that would be joined again at once are not cut. torch's ``fully_shard`` gathers a
weight that is sharded along another dim than its first, and sums its gradient, by as many pieces as there are
ranks. On 1,024 fake ranks most of a step's time would go into these pieces. Without values, one view of the
whole tensor in the joined pieces' shape costs the same: the cut is one view too, and the copy is as large.

Experts reorder the rows that they receive, by as many pieces as all ranks have experts together. There too
the whole tensor replaces its pieces: forward cuts by one operator and copies by another; backward takes a
view of each piece, and copies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spbench.bench.measure.trace.event_log import EventLog
from spbench.bench.measure.trace.memory import MemoryMeter
from spbench.bench.measure.trace.meter import CommunicationMeter
from spbench.bench.measure.trace.step_records import EventRecord, MessageRecord, StepRecord, StorageRecord
from spbench.bench.measure.trace.torch_internals import FakeTensor, fsdp_collectives, replaced
from spbench.impls import Key, permutation


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


class _Uncut:
    """A whole tensor in place of its ``number`` equal pieces along a dim."""

    def __init__(self, whole: Tensor, number: int, dim: int):
        self._whole, self._number, self._dim = whole, number, dim

    def side_by_side(self, dim: int) -> Tensor:
        """A view in the shape of the pieces put together along another dim; values stay in their order."""
        shape = [*self._whole.shape]
        shape[self._dim] //= self._number
        shape[dim] *= self._number
        return self._whole.view(shape)


class _TorchThatCutsNothing:
    """The module torch, for code that cuts tensors into pieces only to put the pieces together."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor] | _Uncut:
        alike = type(tensor) is FakeTensor and tensor.is_contiguous() and not tensor.shape[dim] % chunks
        return _Uncut(tensor, chunks, dim) if alike else torch.chunk(tensor, chunks, dim)

    def cat(self, tensors: Sequence[Tensor] | _Uncut, dim: int = 0, **out: Tensor) -> Tensor:
        pieces = [tensors.side_by_side(dim)] if isinstance(tensors, _Uncut) else [*tensors]
        return torch.cat(pieces, dim, **out)


class _Cut(torch.autograd.Function):
    """Returns the whole tensor in place of the pieces into which :func:`torch.split` would cut it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.cat([gradient])


class _PutTogether(torch.autograd.Function):
    """Puts the pieces of :class:`_Cut` together in any order; ``views`` is called with their number, as
    backward takes a view of each piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, views: Callable[[int], None], pieces: int) -> Tensor:
        ctx.views, ctx.pieces = views, pieces
        return torch.cat([x])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.views(ctx.pieces)
        return gradient, None, None


def _reordering(views: Callable[[int], None]) -> Callable[..., Tensor]:
    reorder = permutation.reordered

    def reordered(x: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        if type(x) is not FakeTensor:
            return reorder(x, sizes, order)
        # torch takes no view of a piece without elements that has one dim
        pieces = len(sizes) if x.ndim > 1 else sum(size > 0 for size in sizes)
        return _PutTogether.apply(_Cut.apply(x), views, pieces)

    return reordered


@contextmanager
def nothing_cut(views: Callable[[int], None]) -> Iterator[None]:
    """Within the context, neither ``fully_shard`` nor :func:`.permutation.reordered` cuts fake tensors into
    pieces that would be put together at once.

    Args:
        views: called with the number of views that backward would have taken.
    """
    with (
        replaced(fsdp_collectives(), {"torch": _TorchThatCutsNothing()}),
        replaced(permutation, {"reordered": _reordering(views)}),
    ):
        yield
