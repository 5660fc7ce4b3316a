"""Gradients in buckets that are summed while backward still runs, as in torch's DistributedDataParallel.

torch's own wrapper does not run on fake tensors: its reducer is C++ that reads the storage of gradients. This
module follows the rules of the reducer (torch/csrc/distributed/c10d/reducer.cpp) before the reducer rebuilds
its buckets, once, in the order in which gradients arrived.

:func:`weakly` makes hooks that do not keep their object alive.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, TypeVar
from weakref import WeakMethod

import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce_async

T = TypeVar("T")

MIB = 2**20
#: bytes at which a bucket is full: the first bucket, small so that communication starts early, and others
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * MIB, 25 * MIB


@dataclass
class Bucket:
    """A flat copy of some parameters' gradients, which one all-reduce sums over ``group`` (None: no sum)."""

    group: dist.ProcessGroup | None
    parameters: list[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        sizes = [p.numel() for p in self.parameters]
        self.flat = self.parameters[0].new_zeros(sum(sizes))
        self.views = dict(zip(self.parameters, self.flat.split(sizes), strict=True))


class BucketedGradients:
    """Buckets of gradients, filled by hooks while backward makes gradients.

    Args:
        summed: parameters in the order of registration, by the group over which gradients are summed.
        order: all parameters in the order of registration.
    """

    def __init__(
        self,
        summed: Iterable[tuple[dist.ProcessGroup | None, list[nn.Parameter]]],
        order: list[nn.Parameter],
    ):
        self.buckets = [Bucket(group, run) for group, ps in summed for run in in_buckets(ps)]
        # every rank sends buckets in this order, whatever the order of its backward: by their last parameter
        place = {p: i for i, p in enumerate(order)}
        self.buckets.sort(key=lambda bucket: -place[bucket.parameters[0]])
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        #: parameters whose next gradient is their last of the step, after which it may be sent
        self.last: dict[nn.Parameter, None] = {}
        self.next = 0
        for p in order:
            p.register_post_accumulate_grad_hook(weakly(self._arrived))
        self.zero()

    def tensors(self) -> list[Tensor]:
        """The flat tensors of all buckets."""
        return [bucket.flat for bucket in self.buckets]

    def zero(self) -> None:
        """Before a step: free all gradients, and expect one for each parameter."""
        self.last.clear()
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
            for p in bucket.parameters:
                p.grad = None

    def expect_last(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that the next backward is the step's last one to make gradients of these parameters."""
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
    """Yields the parameters of each bucket, from the last parameter on, which backward reaches first."""
    enough = chain([FIRST_BUCKET_BYTES], repeat(BUCKET_BYTES))
    return full_runs(reversed(parameters), lambda p: p.nbytes, enough)


def full_runs(each: Iterable[T], size: Callable[[T], int], enough: Iterator[int]) -> Iterator[list[T]]:
    """Yields runs of ``each``, which are the whole; a run ends when its sizes reach the next ``enough``."""
    run, filled, limit = list[T](), 0, next(enough)
    for one in each:
        run.append(one)
        filled += size(one)
        if filled >= limit:
            yield run
            run, filled, limit = [], 0, next(enough)
    if run:
        yield run


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """A hook that calls a bound method with its arguments while the method's object lives.

    Python's garbage collector does not see the objects that a tensor's hook holds, such as process groups. If
    a hook held the module of its tensor, both would form a cycle that is never freed.
    """
    reference = WeakMethod(method)

    def hook(*arguments: Any) -> None:
        if (bound := reference()) is not None:
            bound(*arguments)

    return hook
