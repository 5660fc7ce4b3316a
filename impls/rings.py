"""Messages from rank to rank: round a ring, to a neighbour, or between two peers.

Rings go one way, from each rank to the next; a message the other way is an :func:`exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.keyed_steps import Key, keyed_steps

#: what the work on a block depends on of its owner's rank, beside what :func:`ring` knows already
OwnerKey = Callable[[int], Hashable]


def ring(
    chunk: Tensor, group: dist.ProcessGroup | None, depends_on: OwnerKey | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Pass ``chunk`` around the ring: yields (owner, chunk of that owner), this rank's own first.

    After N steps every rank has seen every chunk and has sent N-1 of them. A chunk that is yielded
    may be read until the next one is asked for.

    Args:
        depends_on: of an owner, what the operators and shapes of the loop's body depend on. Whether it is
            this rank, a lower or a higher one, and whether its chunk is the last, need not be said. Of the
            steps that depend on the same, the virtual engine runs only some (:func:`keyed_steps`).
    """
    if group is None or group.size() == 1:
        yield 0, chunk
        return
    size, rank = group.size(), group.rank()
    current = chunk.contiguous()
    for step in keyed_steps(size, _ring_key(size, rank, depends_on)):
        yield (rank - step) % size, current
        if step < size - 1:
            current = shift(current, group)


def owners_in_turn(group: dist.ProcessGroup, depends_on: OwnerKey | None = None) -> Iterator[int]:
    """The ranks in the order in which their chunks pass by in a :func:`ring`, for what is here already."""
    size, rank = group.size(), group.rank()
    for step in keyed_steps(size, _ring_key(size, rank, depends_on)):
        yield (rank - step) % size


def _ring_key(size: int, rank: int, depends_on: OwnerKey | None) -> Key:
    """What a step round the ring depends on: whether it is the first, which has the rank's own block, or the
    last, which sends nothing; whether the owner is a lower rank, as causal masks do; ``depends_on``."""

    def key(step: int) -> Hashable:
        owner = (rank - step) % size
        return step == 0, step == size - 1, owner < rank, depends_on and depends_on(owner)

    return key


def shift(chunk: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``chunk`` to the next rank of the group and return what the rank before sent."""
    size, rank = group.size(), group.rank()
    received = torch.empty_like(chunk)
    exchange([(chunk, (rank + 1) % size)], [(received, (rank - 1) % size)], group)
    return received


class Ring:
    """Messages to the next rank while it works on something else, one set of tensors under way at a time.

    Raises RuntimeError where it is misused: started twice, finished before it was started, or what is being
    sent was written to meanwhile.

    Args:
        barrier: after each wait all ranks meet, and the host waits until the device has come there, as
            torch's barrier does on NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, *, barrier: bool = False):
        self.group, self.barrier = group, barrier
        self._sent: list[tuple[Tensor, int]] = []
        self._received: list[Tensor] = []
        self._works: list[dist.Work] = []

    def start(self, *tensors: Tensor, to: int = 1) -> None:
        """Begin to send tensors to the next rank, or to the one ``to`` ranks on, and to receive as many from
        as far back."""
        if self._sent:
            raise RuntimeError("tensors are under way already; finish first")
        size, rank = self.group.size(), self.group.rank()
        sent = [x.contiguous() for x in tensors]
        self._sent = [(x, x._version) for x in sent]
        self._received = [torch.empty_like(x) for x in sent]
        onward, back = (rank + to) % size, (rank - to) % size
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=onward) for x in sent]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=back) for x in self._received]
        self._works = dist.batch_isend_irecv(operations)

    def finish(self) -> tuple[Tensor, ...]:
        """Wait for what is under way; returns what the rank behind sent."""
        if not self._sent:
            raise RuntimeError("nothing is under way; start first")
        for work in self._works:
            work.wait()
        if self.barrier:
            dist.barrier(self.group)
            wait_for_device(self._received[0])
        if any(x._version != version for x, version in self._sent):
            raise RuntimeError("a tensor was written to while it was being sent")
        received = tuple(self._received)
        self._sent, self._received, self._works = [], [], []
        return received

    def round(
        self, *tensors: Tensor, depends_on: OwnerKey | None = None
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Pass tensors round the ring: yields (owner, tensors of that owner), this rank's own first, each set
        while the next one is under way. After N steps every rank has seen all and has sent N-1 sets.
        ``depends_on`` is that of :func:`ring`."""
        size, rank = self.group.size(), self.group.rank()
        for step in keyed_steps(size, _ring_key(size, rank, depends_on)):
            if step < size - 1:
                self.start(*tensors)
            yield (rank - step) % size, tensors
            if step < size - 1:
                tensors = self.finish()


def wait_for_device(x: Tensor) -> None:
    """The host waits until the device that x is on has done all that it was given, as where it reads a
    value. On fake tensors nothing waits, and the event log notes it."""
    torch.get_device_module(x.device).synchronize()


def exchange(
    sends: Iterable[tuple[Tensor, int]],
    receives: Iterable[tuple[Tensor, int]],
    group: dist.ProcessGroup,
    *,
    host_waits: bool = False,
) -> None:
    """Send tensors and fill others, each with the rank of its peer in the group; the device waits for all of
    it, and the host too if it is to."""
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    if host_waits and operations:
        wait_for_device(operations[0].tensor)


def begin_exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """As :func:`exchange`, one message after another; returns what is to be waited for, sends first. Ranks of
    even number send before they receive, so that neighbours do not wait for each other."""
    sent = [partial(dist.isend, x, group=group, group_dst=peer) for x, peer in sends]
    received = [partial(dist.irecv, x, group=group, group_src=peer) for x, peer in receives]
    in_order = [*sent, *received] if group.rank() % 2 == 0 else [*received, *sent]
    works = {begin: begin() for begin in in_order}
    return [work for begin in (*sent, *received) if (work := works[begin]) is not None]


def add_from_peer(x: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Add to x, in place, the peer's x, while the peer does the same."""
    received = torch.empty_like(x)
    exchange([(x, peer)], [(received, peer)], group)
    x.add_(received)
