"""What a trace need not do one by one: like steps of a loop, and pieces that are put together again.

Of such steps a few are run, and the others are written down from the last of them. A ring of N ranks takes N
steps a layer, and nearly all of them do the same: they call the same operators on the same shapes, post the
same messages, and free what an earlier step made. So do the micro-batches of a pipeline stage once it
alternates forward and backward. :class:`RepeatedSteps` watches what a loop of :mod:`impls.keyed_steps` writes
into the meters, step by step. Where the last two steps have one key and wrote the same, the last one is
written down again for each further step of that key, and the loop goes on after them.

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

Pieces of a fake tensor that are put together again at once are not cut. torch's ``fully_shard`` gathers a
weight that is sharded along another dim than its first, and sums its gradient, by way of its pieces: as many
as there are ranks, put together along the other dim. On 1,024 fake ranks most of a step's time goes into
making these. Where nothing has values, a view of the whole tensor that has the shape of the pieces side by
side does as well: it is one view, as the cut is one, and what is copied then is as large.

Experts put the rows that they receive in another order, by as many pieces as ranks have experts together.
There the whole is as good as its pieces: forward cuts by one operator and copies by another, backward takes
a view of each piece, and copies.
"""

from __future__ import annotations

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
        """Yield, in order, which of a loop's ``size`` steps must be run; see :func:`keyed_steps`."""
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
        """Whether the step that has just ended stands for all further steps with its key."""
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
        """Write down the steps from ``step`` on with the key of the step before; returns how many."""
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
        """The pieces put together along another dim, as to the shape: the values stay in their order."""
        shape = [*self._whole.shape]
        shape[self._dim] //= self._number
        shape[dim] *= self._number
        return self._whole.view(shape)


class _TorchThatCutsNothing:
    """The module torch, for one that asks for pieces only to put them together."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor] | _Uncut:
        alike = type(tensor) is FakeTensor and tensor.is_contiguous() and not tensor.shape[dim] % chunks
        return _Uncut(tensor, chunks, dim) if alike else torch.chunk(tensor, chunks, dim)

    def cat(self, tensors: Sequence[Tensor] | _Uncut, dim: int = 0, **out: Tensor) -> Tensor:
        pieces = [tensors.side_by_side(dim)] if isinstance(tensors, _Uncut) else [*tensors]
        return torch.cat(pieces, dim, **out)


class _Cut(torch.autograd.Function):
    """Hands on the whole tensor in place of the pieces that :func:`torch.split` makes of it."""

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
    """Inside, neither ``fully_shard`` nor :func:`.permutation.reordered` cuts fake tensors into pieces that
    are put together at once.

    Args:
        views: takes a number of views that backward would have taken.
    """
    with (
        replaced(fsdp_collectives(), {"torch": _TorchThatCutsNothing()}),
        replaced(permutation, {"reordered": _reordering(views)}),
    ):
        yield
