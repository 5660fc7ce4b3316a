"""Gradients in buckets that are summed while backward still runs, as in torch's DistributedDataParallel.

torch's own wrapper does not run on fake tensors: its reducer is C++ that reads the storage of gradients. The
rules here are the reducer's (torch/csrc/distributed/c10d/reducer.cpp) before it has rebuilt its buckets,
once, in the order in which gradients arrived.

Hooks that do not keep alive what they call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce_async

MIB = 2**20
#: bytes at which a bucket is full: the first one, so that communication starts early, and the others
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * MIB, 25 * MIB


@dataclass
class Bucket:
    """A flat copy of some parameters' gradients, summed as one over the group (None: a rank alone)."""

    group: dist.ProcessGroup | None
    parameters: list[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        sizes = [p.numel() for p in self.parameters]
        self.flat = self.parameters[0].new_zeros(sum(sizes))
        self.views = dict(zip(self.parameters, self.flat.split(sizes), strict=True))


class BucketedGradients:
    """Makes the buckets, and hooks that fill them as backward makes gradients.

    Args:
        summed: parameters in the order of registration, by the group over which to sum.
        order: the parameters in the order of registration.
    """

    def __init__(
        self,
        summed: Iterable[tuple[dist.ProcessGroup | None, list[nn.Parameter]]],
        order: list[nn.Parameter],
    ):
        self.buckets = [Bucket(group, run) for group, ps in summed for run in in_buckets(ps)]
        # sent in this order on every rank, however backward goes there: by each bucket's last parameter
        place = {p: i for i, p in enumerate(order)}
        self.buckets.sort(key=lambda bucket: -place[bucket.parameters[0]])
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        #: parameters whose next gradient is the last of the step, which is sent
        self.last: dict[nn.Parameter, None] = {}
        self.next = 0
        for p in order:
            p.register_post_accumulate_grad_hook(weakly(self._arrived))
        self.zero()

    def tensors(self) -> list[Tensor]:
        """The buckets."""
        return [bucket.flat for bucket in self.buckets]

    def zero(self) -> None:
        """Before a step."""
        self.last.clear()
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
            for p in bucket.parameters:
                p.grad = None

    def expect_last(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before the last backward of a step that makes gradients of these."""
        self.last |= dict.fromkeys(parameters)

    def finish(self) -> None:
        """After the last backward: wait for the sums and copy them back to the gradients."""
        late = [bucket for bucket in self.buckets if bucket.missing]
        assert not late, "backward gave no gradient for some parameters"
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            for p, view in bucket.views.items():
                assert p.grad is not None
                p.grad.copy_(view.view_as(p))

    def _arrived(self, p: nn.Parameter) -> None:
        if p not in self.last:
            return
        bucket = self.bucket_of[p]
        assert p.grad is not None
        bucket.views[p].copy_(p.grad.flatten())
        bucket.missing.remove(p)
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            ready = self.buckets[self.next]
            ready.work = all_reduce_async(ready.flat, ready.group)
            self.next += 1


def in_buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters of each bucket, from the last on: backward reaches those first."""
    limit, run, nbytes = FIRST_BUCKET_BYTES, [], 0
    for p in reversed(parameters):
        run.append(p)
        nbytes += p.nbytes
        if nbytes >= limit:
            yield run
            limit, run, nbytes = BUCKET_BYTES, [], 0
    if run:
        yield run


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """A hook that calls a bound method with its arguments while the method's object lives.

    Python's garbage collector does not see what a tensor's hook holds, such as process groups. A module whose
    hook held it would form a cycle that is never collected.
    """
    reference = WeakMethod(method)

    def hook(*arguments: Any) -> None:
        if (bound := reference()) is not None:
            bound(*arguments)

    return hook
