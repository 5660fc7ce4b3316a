"""Rates of collectives over message sizes, with algorithm and bus bandwidth as nccl-tests defines them.

S is the size of the whole buffer in bytes: the input of all_reduce, reduce_scatter and all_to_all, the output
of all_gather, the message of each rank in send_recv. In t seconds on n ranks, the algorithm bandwidth is S/t.
The bus bandwidth, the bytes that a rank sends over t, is S/t times 2 (n - 1) / n for all_reduce,
(n - 1) / n for all_gather, reduce_scatter and all_to_all, and 1 for send_recv
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.bench.tools.calibrate.compute_rates import RatePoint, RateSweep, timed
from spbench.impls import WIRE_SHARE, all_gather_flat, all_reduce, exchange, reduce_scatter_flat

#: a message to the next rank; on several nodes also messages to the next rank of the same node, and messages
#: to a rank of the next node
SEND, SEND_WITHIN, SEND_BETWEEN = "send_recv", "send_recv intra-node", "send_recv inter-node"
_ITEM_BYTES = 4


@dataclass(frozen=True)
class _Call:
    """A collective that is ready to run, and the result that the first run must have."""

    run: Callable[[], Any]
    buffers: tuple[Tensor, ...]
    expected: Tensor

    def wrong(self) -> int:
        """Run the call once, and set its buffers to zero, because a sum in place would grow from run to run.
        Returns the number of wrong elements in the result."""
        returned = self.run()
        result = self.buffers[-1] if returned is None else returned
        count = int((result != self.expected).sum())
        for buffer in self.buffers:
            buffer.zero_()
        return count


#: a function that makes the call of a group, for a number of elements, on a device
_Maker = Callable[[dist.ProcessGroup, int, str], _Call]


def _parts(numbers: Tensor, count: int) -> Tensor:
    """``count`` elements, in which each number is repeated equally often: numbers [N] to [count]."""
    return numbers.repeat_interleave(count // len(numbers))


def _all_reduce(group: dist.ProcessGroup, count: int, device: str) -> _Call:
    n, rank = group.size(), group.rank()
    x = torch.full((count,), rank + 1.0, device=device)
    return _Call(lambda: all_reduce(x, group), (x,), torch.full_like(x, n * (n + 1) / 2))


def _all_gather(group: dist.ProcessGroup, count: int, device: str) -> _Call:
    n, rank = group.size(), group.rank()
    part = torch.full((count // n,), rank + 1.0, device=device)
    gathered = torch.zeros(count, device=device)
    expected = _parts(torch.arange(1.0, n + 1, device=device), count)
    return _Call(lambda: all_gather_flat(part, group, gathered), (part, gathered), expected)


def _reduce_scatter(group: dist.ProcessGroup, count: int, device: str) -> _Call:
    n, rank = group.size(), group.rank()
    summed = _parts(torch.arange(1.0, n + 1, device=device), count) * (rank + 1)
    expected = torch.full((count // n,), (rank + 1) * n * (n + 1) / 2, device=device)
    return _Call(lambda: reduce_scatter_flat(summed, group), (summed,), expected)


def _all_to_all(group: dist.ProcessGroup, count: int, device: str) -> _Call:
    n, rank = group.size(), group.rank()
    numbers = torch.arange(float(n), device=device)
    sent, received = _parts(rank * n + numbers, count), torch.zeros(count, device=device)

    def run() -> None:
        dist.all_to_all_single(received, sent, group=group)

    return _Call(run, (sent, received), _parts(numbers * n + rank, count))


def _message(peers: tuple[int, int], group: dist.ProcessGroup, count: int, device: str) -> _Call:
    """The call that sends a message to the first of two ranks and receives one from the second."""
    to, origin = peers
    sent = torch.full((count,), group.rank() + 1.0, device=device)
    received = torch.zeros(count, device=device)
    run = partial(exchange, [(sent, to)], [(received, origin)], group)
    return _Call(run, (sent, received), torch.full_like(sent, origin + 1.0))


_MAKERS = (_all_reduce, _all_gather, _reduce_scatter, _all_to_all)
_COLLECTIVES: dict[str, _Maker] = {maker.__name__.removeprefix("_"): maker for maker in _MAKERS}


def bus_factor(operation: str, n: int) -> float:
    """The bus bandwidth over the algorithm bandwidth on n ranks: the share of S that a rank sends."""
    collective = "send" if operation.startswith(SEND) else operation
    return float(WIRE_SHARE[collective](n))


def collective_rates(device: str, sweep: RateSweep) -> Iterator[RatePoint]:
    """The points of each collective over all ranks, the same on all ranks; no points on a single rank."""
    group = dist.group.WORLD
    assert group is not None
    n = group.size()
    if n == 1:
        return
    for operation, ready in (*_COLLECTIVES.items(), *_messages(group).items()):
        for asked in sweep.message_bytes:
            count = asked // _ITEM_BYTES // n * n
            if count == 0:
                continue
            call = ready(group, count, device)
            wrong = torch.tensor(call.wrong(), device=device)
            dist.all_reduce(wrong)
            samples, nbytes = timed(call.run, device, sweep), count * _ITEM_BYTES
            point = RatePoint(operation, f"{nbytes} B", nbytes, "fp32", n, samples, nbytes=nbytes)
            yield replace(point, bus_factor=bus_factor(operation, n), wrong=int(wrong))
            if min(samples) > sweep.longest_call_s:
                break


def _messages(group: dist.ProcessGroup) -> dict[str, _Maker]:
    """The makers of messages round the ring of all ranks and, on several nodes with equally many ranks, of
    messages to the next rank of the same node, and to the rank in the same place on the next node."""
    n, rank, local = group.size(), group.rank(), ranks_per_node(group)
    peers = {SEND: ((rank + 1) % n, (rank - 1) % n)}
    if local < n:
        peers[SEND_BETWEEN] = (rank + local) % n, (rank - local) % n
    if 1 < local < n:
        first = rank // local * local
        peers[SEND_WITHIN] = first + (rank + 1) % local, first + (rank - 1) % local
    return {operation: partial(_message, pair) for operation, pair in peers.items()}


def ranks_per_node(group: dist.ProcessGroup) -> int:
    """The number of ranks on each host; the size of the group if hosts have different numbers of ranks."""
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, platform.node(), group=group)
    counts = set(Counter(hosts).values())
    return counts.pop() if len(counts) == 1 else group.size()
