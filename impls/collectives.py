"""The communication primitives that strategies share.

Each function of this table has a gradient; its backward is the transpose of its forward:

====================  =======================  ==========================  =================================
function              forward                  backward                    use: x before, result after
====================  =======================  ==========================  =================================
copy_to_group         nothing                  all-reduce                  same on all ranks, used differently
copy_rows_to_group    nothing                  all-reduce of some rows     the same, for these rows of x
reduce_from_group     all-reduce               nothing                     parts of a sum, used alike
sum_over_group        all-reduce               all-reduce                  parts of a sum, used differently
gather_from_group     all-gather               own chunk                   chunks, used alike
all_gather            all-gather               reduce-scatter              chunks, used differently
scatter_to_group      own chunk                all-gather                  same on all ranks, chunks
reduce_scatter        reduce-scatter           all-gather                  parts of a sum, chunks
all_to_all            all-to-all               all-to-all, dims swapped    chunks along one dim, then another
====================  =======================  ==========================  =================================

"Used alike" means that every rank computes the same from the result, so that each rank already has the whole
gradient; "used differently" means that the gradients of the ranks must be summed. Dims count from the front.
The other functions work on plain tensors, as inside a strategy's own backward. Functions that accept None as
their group, or a group of one rank, then do nothing.

All functions call torch.distributed's own collectives on the group that is passed in, so they run alike on
NCCL, Gloo and the fake group, and a meter that observes the c10d operators sees all messages.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.kernels.kept_results import keeping, kept
from spbench.impls.rings import OwnerKey, Ring, add_from_peer, begin_exchange, exchange, owners_in_turn, ring

__all__ = [
    "OwnerKey",
    "Ring",
    "add_from_peer",
    "all_gather",
    "all_gather_flat",
    "all_gather_in_place",
    "all_gather_rows_into",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "begin_exchange",
    "copy_rows_to_group",
    "copy_to_group",
    "exchange",
    "gather_from_group",
    "joined",
    "owners_in_turn",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_flat",
    "reduce_scatter_in_place",
    "ring",
    "scatter_to_group",
    "start_all_gather",
    "start_reduce_scatter",
    "sum_over_group",
    "with_gradient",
]


class ReusedBuffer:
    """Memory that is lent again and again and never freed, as Megatron-LM's GlobalMemoryBuffer: one flat
    tensor for each dtype, which grows to the largest shape so far. A loan may overwrite the loan before."""

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Lends memory of that shape, with the dtype and the device of ``like``; its values are arbitrary."""
        elements = math.prod(shape)
        held = self._held.get(like.dtype)
        if held is None or held.numel() < elements:
            held = self._held[like.dtype] = like.new_empty(elements)
        return held[:elements].view(tuple(shape))


def __dir__() -> list[str]:
    return __all__


# renamed in torch 2.13
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | None
#: a function of a tensor, the arguments of a collective, and a group
Collective = Callable[..., Tensor]


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum x (or reduce it by ``op``) over the group, in place; returns x."""
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


def all_reduce_async(x: Tensor, group: Group) -> dist.Work | None:
    """Begin to sum x over the group, in place; x may be read after waiting for the returned work (None: at
    once)."""
    if group is None or group.size() == 1:
        return None
    return dist.all_reduce(x, group=group, async_op=True)


class _Collective(torch.autograd.Function):
    """``forward(x, *args, group)``, in place if it returns x itself; its gradient is ``backward(...)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective, *args: Any) -> Tensor:
        ctx.transposed, ctx.args = backward, args
        y = forward(x, *args)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transposed(gradient, *ctx.args), None, None, *(None for _ in ctx.args)


def with_gradient(forward: Collective, backward: Collective, x: Tensor, *args: Any) -> Tensor:
    """``forward(x, *args)`` with the gradient ``backward(gradient, *args)``; the last argument is the group.
    x itself if the group has one rank."""
    group: Group = args[-1]
    return x if group is None or group.size() == 1 else _Collective.apply(x, forward, backward, *args)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """x, which is the same on all ranks; its gradient is summed over the ranks (Megatron-LM's f, arXiv
    1909.08053 section 3).

    The gradient is summed in place, so the operator that uses the result must allocate its gradient, as a
    matmul does and an addition does not.
    """
    return with_gradient(_alias, _sum, x, group)


def copy_rows_to_group(x: Tensor, rows: slice, group: Group) -> Tensor:
    """:func:`copy_to_group` for some ``rows`` of x, which are the same on all ranks; the gradient of the
    other rows is each rank's own."""
    return with_gradient(_alias, _sum_of_rows, x, rows, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the ranks, in place, used alike on all ranks (g of arXiv 1909.08053, section 3)."""
    return with_gradient(_summed, _unchanged, x, group)


def sum_over_group(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the ranks, in place, used differently on each rank; backward sums in place too, with
    the condition of :func:`copy_to_group`."""
    return with_gradient(_summed, _sum, x, group)


def gather_from_group(x: Tensor, dim: int, group: Group) -> Tensor:
    """The x of all ranks one after another along ``dim``, used alike on all ranks: backward sends nothing."""
    return with_gradient(_gathered, _own_chunk, x, dim, group)


def scatter_to_group(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's chunk along ``dim`` of x, which is the same on all ranks: forward sends nothing."""
    return with_gradient(_own_chunk, _gathered, x, dim, group)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """The x of all ranks one after another along ``dim``, used differently on each rank: backward sums the
    gradients of the ranks."""
    return with_gradient(_gathered, _summed_chunk, x, dim, group)


def all_gather_rows_into(x: Tensor, group: Group, buffer: ReusedBuffer) -> Tensor:
    """:func:`all_gather` along the first dim, into memory that is lent until the buffer's next use."""
    return with_gradient(
        lambda x, buffer, group: _gathered(x, 0, group, buffer),
        lambda x, _, group: _summed_chunk(x, 0, group),
        *(x, buffer, group),
    )


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's chunk along ``dim`` of the sum of x over the ranks."""
    return with_gradient(_kept_summed_chunk, _gathered, x, dim, group)


def all_to_all(x: Tensor, split_dim: int, gather_dim: int, group: Group) -> Tensor:
    """Exchange which dim of a tensor is spread over the ranks: x is whole along ``split_dim`` and this rank's
    chunk along ``gather_dim``; the result is this rank's chunk along ``split_dim`` and whole along
    ``gather_dim``. N must divide the dim that is split."""
    return with_gradient(exchanged, exchanged_back, x, split_dim, gather_dim, group)


def _unchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x


def _alias(x: Tensor, *args: Any) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_reduce(x.contiguous(), group)


def _sum_of_rows(x: Tensor, rows: slice, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    all_reduce(x[rows], group)
    return x


def _own_chunk(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    # never a view of x, which would keep all of it
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length).clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup, buffer: ReusedBuffer | None = None) -> Tensor:
    whole, work = start_all_gather(x, group, buffer)
    work.wait()
    return joined(whole, dim)


def _summed_chunk(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    chunk, work = start_reduce_scatter(x, dim, group)
    work.wait()
    return chunk


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x summed over the group, in place; in a copy of x if x may be kept for a second run of its layer, which
    would sum x again."""
    return all_reduce(x.clone() if keeping() else x, group)


def _kept_summed_chunk(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return kept(lambda: _summed_chunk(x, dim, group))


def exchanged(
    x: Tensor,
    split_dim: int,
    gather_dim: int,
    group: dist.ProcessGroup,
    packed: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """The result of :func:`all_to_all`; ``packed`` is applied to what is sent, and to what has come."""
    # the collective sends row r of dim 0 to rank r, and puts what rank r sent into row r
    sent = packed(x.unflatten(split_dim, (group.size(), -1)).movedim(split_dim, 0)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return packed(received.movedim(0, gather_dim)).flatten(gather_dim, gather_dim + 1)


def exchanged_back(x: Tensor, split_dim: int, gather_dim: int, *others: Any, **packed: Any) -> Tensor:
    """The gradient of what :func:`exchanged` has exchanged."""
    return exchanged(x, gather_dim, split_dim, *others, **packed)


def reduce_scatter_flat(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [n/N] of the sum of ``whole`` [n] over the ranks."""
    part = whole.new_empty(whole.numel() // group.size())
    _reduce_scatter_into(part, whole, group=group)
    return part


def reduce_scatter_in_place(whole: Tensor, group: dist.ProcessGroup, *, begin: bool) -> dist.Work | None:
    """Sum this rank's part [n/N] of ``whole`` [n] over the ranks, in place; the other parts then have
    arbitrary values. With ``begin`` the sum is complete after waiting for the returned work; else the
    function returns None after the sum."""
    part = whole.chunk(group.size())[group.rank()]
    work: dist.Work | None = _reduce_scatter_into(part, whole, group=group, async_op=begin)
    return work


def all_gather_in_place(whole: Tensor, group: dist.ProcessGroup, *, begin: bool) -> dist.Work | None:
    """Gather the ranks' parts [n/N] in ``whole`` [n], in which each rank has its own part already. ``begin``
    and the returned work are as in :func:`reduce_scatter_in_place`."""
    part = whole.chunk(group.size())[group.rank()]
    work: dist.Work | None = _gather_into(whole, part, group=group, async_op=begin)
    return work


def all_gather_flat(part: Tensor, group: dist.ProcessGroup, into: Tensor | None = None) -> Tensor:
    """The parts [n/N] of all ranks one after another [n], in the memory ``into`` unless this is None."""
    whole = part.new_empty(part.numel() * group.size()) if into is None else into
    _gather_into(whole, part, group=group)
    return whole


def start_all_gather(
    x: Tensor, group: dist.ProcessGroup | None, buffer: ReusedBuffer | None = None
) -> tuple[Tensor, dist.Work]:
    """Start to gather x [...] of all ranks; returns (tensor [N, ...], work): the tensor is complete after
    ``work.wait()``, in memory that ``buffer`` lends, or in new memory."""
    assert group is not None, "one rank has nothing to gather"
    shape = (group.size(), *x.shape)
    whole = x.new_empty(shape) if buffer is None else buffer.take(shape, x)
    return whole, _gather_into(whole.flatten(), x.flatten(), group=group, async_op=True)


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to sum x over the ranks and to give each rank its chunk along ``dim``; returns (this rank's
    chunk, work): the chunk is complete after ``work.wait()``."""
    rows = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    chunk = torch.empty_like(rows[0])
    return chunk, _reduce_scatter_into(chunk.flatten(), rows.flatten(), group=group, async_op=True)


def joined(gathered: Tensor, dim: int) -> Tensor:
    """The parts [N, ...] of :func:`start_all_gather`, one after another along dim ``dim`` of a part."""
    return gathered.movedim(0, dim).flatten(dim, dim + 1)
