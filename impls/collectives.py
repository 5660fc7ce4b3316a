"""The communication primitives that strategies share.

Everything here goes through torch.distributed's own collectives on the group that is passed in, so
it runs alike on NCCL, Gloo and the fake group, and a meter that observes the c10d operators sees all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.kernels.reused_buffer import ReusedBuffer
from spbench.impls.keyed_steps import Key, keyed_steps

# renamed in torch 2.13
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or ``op``) x over the group, in place; nothing to do without one or with one rank."""
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


def all_reduce_async(x: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Begin to sum x over the group, in place; it may be read when what is returned has been waited for."""
    if group is None or group.size() == 1:
        return None
    return dist.all_reduce(x, group=group, async_op=True)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous(), ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous(), ctx.group), None


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Identity forward, all-reduce backward: x is the same on all ranks, its uses differ
    (Megatron-LM's f, arXiv 1909.08053 section 3).

    The gradient is summed in place, so what uses the result must make a gradient of its own, as a
    matrix product does and an addition does not.
    """
    return x if group is None or group.size() == 1 else _CopyToGroup.apply(x, group)


class _CopyRowsToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: slice, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.contiguous()
        all_reduce(gradient[ctx.rows], ctx.group)
        return gradient, None, None


def copy_rows_to_group(x: Tensor, rows: slice, group: dist.ProcessGroup | None) -> Tensor:
    """As :func:`copy_to_group`, where only these rows of x are the same on all ranks; the gradient of the
    other rows is each rank's own."""
    return x if group is None or group.size() == 1 else _CopyRowsToGroup.apply(x, rows, group)


def reduce_from_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce forward (in place), identity backward: the sum is used alike on all ranks
    (Megatron-LM's g, arXiv 1909.08053 section 3)."""
    return x if group is None or group.size() == 1 else _ReduceFromGroup.apply(x, group)


def sum_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce forward and backward, both in place: each rank uses the sum in its own way, with the
    condition of :func:`copy_to_group` on that use."""
    return x if group is None or group.size() == 1 else _SumOverGroup.apply(x, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.split_dim, ctx.gather_dim, ctx.group = split_dim, gather_dim, group
        return _exchange_parts(x, split_dim, gather_dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_parts(gradient, ctx.gather_dim, ctx.split_dim, ctx.group), None, None, None


def _exchange_parts(x: Tensor, split_dim: int, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
    # the collective sends row r of dim 0 to rank r, and puts what rank r sent into row r
    sent = x.unflatten(split_dim, (group.size(), -1)).movedim(split_dim, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def all_to_all(x: Tensor, split_dim: int, gather_dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Exchange which dim of a tensor is spread over the ranks: x is whole along ``split_dim`` and this rank's
    chunk along ``gather_dim``; the result is this rank's chunk along ``split_dim`` and whole along
    ``gather_dim``. Dims count from the front; N must divide the one that is split. Backward is the inverse.
    """
    return x if group is None or group.size() == 1 else _AllToAll.apply(x, split_dim, gather_dim, group)


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
            current = _shift(current, group)


def owners_in_turn(group: dist.ProcessGroup) -> Iterator[int]:
    """The ranks in the order in which their chunks pass by in a :func:`ring`, for what is here already."""
    size, rank = group.size(), group.rank()
    for step in keyed_steps(size, _ring_key(size, rank, None)):
        yield (rank - step) % size


def _ring_key(size: int, rank: int, depends_on: OwnerKey | None) -> Key:
    """What a step round the ring depends on: whether it is the first, which has the rank's own block, or the
    last, which sends nothing; whether the owner is a lower rank, as causal masks do; ``depends_on``."""

    def key(step: int) -> Hashable:
        owner = (rank - step) % size
        return step == 0, step == size - 1, owner < rank, depends_on and depends_on(owner)

    return key


def _shift(chunk: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``chunk`` to the next rank and return what the previous one sent."""
    size, rank = group.size(), group.rank()
    received = torch.empty_like(chunk)
    exchange([(chunk, (rank + 1) % size)], [(received, (rank - 1) % size)], group)
    return received


class Ring:
    """Messages to the next rank while it works on something else, one set of tensors under way at a time.

    Raises RuntimeError where it is misused: started twice, finished before it was started, or what is being
    sent was written to meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._sent: list[tuple[Tensor, int]] = []
        self._received: list[Tensor] = []
        self._works: list[dist.Work] = []

    def start(self, *tensors: Tensor) -> None:
        """Begin to send tensors to the next rank, and to receive as many from the previous one."""
        if self._sent:
            raise RuntimeError("tensors are under way already; finish first")
        size, rank = self.group.size(), self.group.rank()
        sent = [x.contiguous() for x in tensors]
        self._sent = [(x, x._version) for x in sent]
        self._received = [torch.empty_like(x) for x in sent]
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=(rank + 1) % size) for x in sent]
        operations += [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=(rank - 1) % size) for x in self._received
        ]
        self._works = dist.batch_isend_irecv(operations)

    def finish(self) -> tuple[Tensor, ...]:
        """Wait for what is under way; returns what the previous rank sent."""
        if not self._sent:
            raise RuntimeError("nothing is under way; start first")
        for work in self._works:
            work.wait()
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


def exchange(
    sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]], group: dist.ProcessGroup
) -> None:
    """Send tensors and fill others, each with the rank of its peer in the group, and wait for all of it."""
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def reduce_scatter_flat(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, of equal one-dimensional parts, of the sum over ranks."""
    part = whole.new_empty(whole.numel() // group.size())
    _reduce_scatter_into(part, whole, group=group)
    return part


def reduce_scatter_in_place(whole: Tensor, group: dist.ProcessGroup, *, begin: bool) -> dist.Work | None:
    """Sum this rank's part, of equal one-dimensional parts, over the ranks, in place; of the other parts
    nothing is left that means anything. With ``begin`` the sum is there when what is returned has been waited
    for, else when this returns None."""
    part = whole.chunk(group.size())[group.rank()]
    work: dist.Work | None = _reduce_scatter_into(part, whole, group=group, async_op=begin)
    return work


def all_gather_in_place(whole: Tensor, group: dist.ProcessGroup, *, begin: bool) -> dist.Work | None:
    """Gather equal one-dimensional parts, of which each rank has its own in its place, in place. ``begin``
    and what is returned are those of :func:`reduce_scatter_in_place`."""
    part = whole.chunk(group.size())[group.rank()]
    work: dist.Work | None = _gather_into(whole, part, group=group, async_op=begin)
    return work


def add_from_peer(x: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Add to x, in place, the peer's x, while the peer does the same."""
    received = torch.empty_like(x)
    exchange([(x, peer)], [(received, peer)], group)
    x.add_(received)


def all_gather_flat(part: Tensor, group: dist.ProcessGroup, into: Tensor | None = None) -> Tensor:
    """The parts of all ranks one after another, from equal one-dimensional parts; in ``into``, if given."""
    whole = part.new_empty(part.numel() * group.size()) if into is None else into
    _gather_into(whole, part, group=group)
    return whole


def start_all_gather(
    x: Tensor, group: dist.ProcessGroup | None, buffer: ReusedBuffer | None = None
) -> tuple[Tensor, dist.Work]:
    """Start to gather x [...] of all ranks; returns [N, ...], which is there after the other's ``wait()``, in
    memory that ``buffer`` lends, or that is made."""
    assert group is not None, "one rank has nothing to gather"
    shape = (group.size(), *x.shape)
    whole = x.new_empty(shape) if buffer is None else buffer.take(shape, x)
    return whole, _gather_into(whole.flatten(), x.flatten(), group=group, async_op=True)


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to sum x over the ranks and give each its chunk along ``dim``; returns this rank's, which is
    there after the other's ``wait()``."""
    rows = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    chunk = torch.empty_like(rows[0])
    return chunk, _reduce_scatter_into(chunk.flatten(), rows.flatten(), group=group, async_op=True)


def joined(gathered: Tensor, dim: int) -> Tensor:
    """The parts [N, ...] of :func:`start_all_gather` one after another along ``dim`` of each."""
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        whole, work = start_all_gather(x, group)
        work.wait()
        return joined(whole, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].contiguous(), None, None


def gather_from_group(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather forward, along a dim that counts from the front; backward each rank takes its chunk of the
    gradient, without a message: the whole is used alike on all ranks."""
    return x if group is None or group.size() == 1 else _GatherFromGroup.apply(x, dim, group)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        chunk, work = start_reduce_scatter(x, dim, group)
        work.wait()
        return chunk

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole, work = start_all_gather(gradient, ctx.group)
        work.wait()
        return joined(whole, ctx.dim), None, None


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's chunk along ``dim`` of the sum of x over the ranks; backward gathers the gradients."""
    return x if group is None or group.size() == 1 else _ReduceScatter.apply(x, dim, group)
