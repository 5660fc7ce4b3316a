"""Messages from rank to rank: round a ring, to a neighbour, or between two peers.

Rings go one way, from each rank to the next; a message the other way is an :func:`exchange`.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.keyed_steps import Key, keyed_steps

#: a key by owner, equal for owners whose blocks take the same work, in addition to what :func:`ring` compares
OwnerKey = Callable[[int], Hashable]


def ring(
    chunk: Tensor, group: dist.ProcessGroup | None, depends_on: OwnerKey | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Pass ``chunk`` around the ring: yields (owner, chunk of that owner), this rank's own first.

    After N steps every rank has seen every chunk and has sent N-1 of them. A chunk that is yielded
    may be read until the next one is asked for.

    Args:
        depends_on: a key of an owner, on which the operators and shapes of the loop's body depend. The key
            need not say whether the owner is this rank, lower or higher, or whether its chunk is the last. Of
            steps with equal keys the virtual engine runs only some (:func:`keyed_steps`).
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
    """Yields the ranks in the order of a :func:`ring`, for chunks that this rank has already."""
    size, rank = group.size(), group.rank()
    for step in keyed_steps(size, _ring_key(size, rank, depends_on)):
        yield (rank - step) % size


def _ring_key(size: int, rank: int, depends_on: OwnerKey | None) -> Key:
    """The key of a step round the ring: whether the step is the first, with the rank's own block, or the
    last, which sends nothing; whether the owner is a lower rank, for causal masks; and ``depends_on``."""

    def key(step: int) -> Hashable:
        owner = (rank - step) % size
        return step == 0, step == size - 1, owner < rank, depends_on and depends_on(owner)

    return key


def shift(chunk: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``chunk`` to the next rank of the group; returns the chunk that the rank before sent."""
    size, rank = group.size(), group.rank()
    received = torch.empty_like(chunk)
    exchange([(chunk, (rank + 1) % size)], [(received, (rank - 1) % size)], group)
    return received


class Ring:
    """Messages to the next rank while this rank computes, one set of tensors under way at a time.

    Raises RuntimeError if it is started twice, finished before it was started, or if a tensor is written to
    while it is being sent.

    Args:
        barrier: after each wait all ranks meet in a barrier, and the host waits for the device, as in torch's
            barrier on NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, *, barrier: bool = False):
        self.group, self.barrier = group, barrier
        self._sent: list[tuple[Tensor, int]] = []
        self._received: list[Tensor] = []
        self._works: list[dist.Work] = []

    def start(self, *tensors: Tensor, to: int = 1) -> None:
        """Begin to send tensors to the rank ``to`` places after this rank, and to receive as many from the
        rank ``to`` places before."""
        if self._sent:
            raise RuntimeError("tensors are under way already; finish first")
        size, rank = self.group.size(), self.group.rank()
        sent = [x.contiguous() for x in tensors]
        self._sent = [(x, x._version) for x in sent]
        self._received = [torch.empty_like(x) for x in sent]
        onward, back = (rank + to) % size, (rank - to) % size
        receives = [(x, back) for x in self._received]
        self._works = post([(x, onward) for x in sent], receives, self.group)

    def finish(self) -> tuple[Tensor, ...]:
        """Wait for the messages under way; returns the received tensors."""
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
        while the next set is under way. After N steps every rank has seen all sets and has sent N-1 sets.
        ``depends_on`` is that of :func:`ring`."""
        size, rank = self.group.size(), self.group.rank()
        for step in keyed_steps(size, _ring_key(size, rank, depends_on)):
            if step < size - 1:
                self.start(*tensors)
            yield (rank - step) % size, tensors
            if step < size - 1:
                tensors = self.finish()


def wait_for_device(x: Tensor) -> None:
    """Let the host wait until the device of x has done all its work, as when the host reads a value. With
    fake tensors the host does not wait, and the event log records the wait."""
    torch.get_device_module(x.device).synchronize()


def exchange(
    sends: Iterable[tuple[Tensor, int]],
    receives: Iterable[tuple[Tensor, int]],
    group: dist.ProcessGroup,
    *,
    host_waits: bool = False,
) -> None:
    """Send tensors and receive into others, given as (tensor, rank of the peer in the group); the device
    waits for all messages, and with ``host_waits`` the host too."""
    sends, receives = [*sends], [*receives]
    for work in post(sends, receives, group):
        work.wait()
    if host_waits and (messages := [*sends, *receives]):
        wait_for_device(messages[0][0])


def post(
    sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Begin the messages of :func:`exchange`, all at once; returns the works to wait for."""
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives]
    return dist.batch_isend_irecv(operations) if operations else []


def begin_exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Begin the messages of :func:`exchange`, one after another; returns the works to wait for, sends first.
    Even ranks send before they receive, so that neighbours do not wait for each other."""
    sent = [partial(dist.isend, x, group=group, group_dst=peer) for x, peer in sends]
    received = [partial(dist.irecv, x, group=group, group_src=peer) for x, peer in receives]
    in_order = [*sent, *received] if group.rank() % 2 == 0 else [*received, *sent]
    works = {begin: begin() for begin in in_order}
    return [work for begin in (*sent, *received) if (work := works[begin]) is not None]


def add_from_peer(x: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Exchange x with a peer, and add the peer's x to x in place, as the peer does too."""
    received = torch.empty_like(x)
    exchange([(x, peer)], [(received, peer)], group)
    x.add_(received)
