"""Main gradients: contiguous buffers into which backward's gradients are added, as in Megatron-Core's
DistributedDataParallel (core/distributed/param_and_grad_buffer.py).

A buffer is allocated once and never freed. When autograd has made a parameter's gradient, it is added to the
parameter's part of the buffer and freed, so only one gradient in the weights' precision exists at a time.
Buckets of the buffer are summed over the group, or sharded: reduce-scattered in place.

Weights that ranks have updated in parts, gathered bucket by bucket as the next forward needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.buckets import weakly
from spbench.impls.backends.buffer_layout import BucketLayout
from spbench.impls.backends.planned_buffers import keep_in_eight_bits
from spbench.impls.collectives import (
    all_gather_in_place,
    all_reduce,
    all_reduce_async,
    reduce_scatter_in_place,
)
from spbench.impls.kernels.projection import Placeholders, fuse_accumulation
from spbench.impls.rings import wait_for_device

#: Megatron-Core divides by the ranks of the group here, in a pass over the bucket, which takes time.
#: Losses here are shares of one sum over all ranks, so the same pass multiplies by 1. It divides gradients of
#: experts by all replicas, so that a rank which alone has its experts takes the pass too
GRADIENT_SCALE = 1.0


class GradientBucket:
    """A bucket of a :class:`GradientBuffer`.

    Attributes:
        parameters: in the order in which they lie.
        gradients, weights: its elements of the buffers [n]; ``weights`` is None where these are not sharded.
        own: start and end, in the bucket, of the part that this rank holds.
        scaled: whether :meth:`reduce` scales gradients where no other rank has them.
        instances: the ranks that hold the same part; None: no other does.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        gradients: Tensor,
        weights: Tensor | None,
        group: dist.ProcessGroup | None,
        instances: dist.ProcessGroup | None = None,
        *,
        scaled: bool = False,
    ):
        self.parameters, self.scaled = parameters, scaled
        self.gradients, self.weights, self.group = gradients, weights, group
        self.instances = instances
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        start, end = layout.shard(rank, size) if weights is not None else (layout.start, layout.end)
        self.own = start - layout.start, end - layout.start
        self.starts = dict(zip(parameters, (s - layout.start for s in layout.starts), strict=True))
        self.missing: set[nn.Parameter] = set()
        self.work: dist.Work | None = None

    def held(self, p: nn.Parameter) -> slice:
        """The elements of the flattened parameter that lie in this rank's part; an empty slice for none."""
        first, last = (edge - self.starts[p] for edge in self.own)
        return slice(min(max(first, 0), p.numel()), min(max(last, 0), p.numel()))

    def of(self, whole: Tensor, p: nn.Parameter, elements: slice) -> Tensor:
        """The part of ``whole``, of all the bucket's elements [n], that has these elements of p."""
        return whole[self.starts[p] + elements.start : self.starts[p] + elements.stop]

    def check(self) -> None:
        """Take the norm of the gradients, for which the host waits, as it looks whether that is NaN."""
        wait_for_device(self.gradients.norm(p=2))

    def reduce(self, *, overlapped: bool) -> None:
        """Sum the gradients over the group, in place: all of them or, if they are sharded, this rank's part.
        If ``overlapped``, only begin to; :meth:`wait` ends it."""
        if self.group is not None or self.scaled:
            self.gradients.mul_(GRADIENT_SCALE)
        if self.group is None:
            return
        if self.weights is not None:
            self.work = reduce_scatter_in_place(self.gradients, self.group, begin=overlapped)
        elif overlapped:
            self.work = all_reduce_async(self.gradients, self.group)
        else:
            all_reduce(self.gradients, self.group)

    def sum_over_instances(self) -> None:
        """After :meth:`reduce` and :meth:`wait`: add up the sums of this rank's part."""
        if self.instances is not None:
            all_reduce(self.gradients[slice(*self.own)], self.instances)

    def gather(self, *, overlapped: bool) -> None:
        """Gather the weights of all ranks' parts, in place; ``overlapped`` as in :meth:`reduce`."""
        if self.group is not None and self.weights is not None:
            self.work = all_gather_in_place(self.weights, self.group, begin=overlapped)

    def wait(self) -> None:
        """Wait for the collective that :meth:`reduce` or :meth:`gather` began."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class GradientBuffer:
    """The main gradients of the parameters summed over one group. If they are sharded, the weights too are
    views of one contiguous buffer.

    Args:
        group: the ranks; None: one alone. If buckets are sharded, the ranks that share each.
        dtype: of the gradients.
        layouts: the buckets of these parameters.
        sharded: whether each rank has a part of every bucket.
        instances: the ranks of other such groups that hold the same parts; None: there is one group.
        scaled: see :class:`GradientBucket`.
        eight_bits: the buffer of weights has bytes; see :func:`keep_in_eight_bits`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        layouts: Sequence[BucketLayout],
        sharded: bool,
        instances: dist.ProcessGroup | None = None,
        *,
        scaled: bool = False,
        eight_bits: bool = False,
    ):
        self._scaled, self.eight_bits = scaled, eight_bits
        elements = layouts[-1].end
        some = parameters[0]
        of_weights = torch.uint8 if eight_bits else some.dtype
        self.weights = some.detach().new_zeros(elements, dtype=of_weights) if sharded else None
        self.gradients = some.detach().new_zeros(elements, dtype=dtype)
        groups = group, instances
        self.buckets = [self._bucket(layout, parameters, groups) for layout in layouts]
        #: the main gradient of each parameter, a view of its shape
        self.views = {
            p: bucket.of(bucket.gradients, p, slice(0, p.numel())).view_as(p)
            for bucket in self.buckets
            for p in bucket.parameters
        }
        if self.weights is not None:
            self._take_weights()

    def _bucket(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
    ) -> GradientBucket:
        elements = slice(layout.start, layout.end)
        weights = None if self.weights is None else self.weights[elements]
        members = [parameters[i] for i in layout.members]
        return GradientBucket(
            layout, members, self.gradients[elements], weights, *groups, scaled=self._scaled
        )

    def _take_weights(self) -> None:
        """Move the weights into the buffer."""
        for bucket in self.buckets:
            assert bucket.weights is not None
            for p in bucket.parameters:
                view = bucket.of(bucket.weights, p, slice(0, p.numel())).view_as(p)
                if self.eight_bits:
                    keep_in_eight_bits(p, view)
                else:
                    view.copy_(p.detach())
                    p.data = view


class MainGradients:
    """Fills buffers as backward makes gradients, and sums them.

    Args:
        overlapped: sum a bucket as soon as the last backward, announced by :meth:`expect_last`, has made all
            its gradients, the buckets of a buffer one after another. Else all are summed at the end.
        fused: give each matrix its main gradient as the attribute ``main_grad``. A linear layer that adds its
            gradient to it sets the parameter's ``grad_added_to_main_grad``; the gradient that autograd then
            gets in its place is dropped.
        checked: take the norm of each bucket before it is summed.
        added_anyway: parameters with several uses, whose gradients autograd adds up. That sum is added to the
            main gradient even if one use has added its own gradient there. Where the parameter's
            ``zero_out_wgrad`` is set, layers give autograd zeros in place of their own.
    """

    def __init__(
        self,
        buffers: Sequence[GradientBuffer],
        *,
        overlapped: bool,
        fused: bool,
        added_anyway: set[nn.Parameter],
        checked: bool = False,
    ):
        self.buffers, self.overlapped, self.checked = buffers, overlapped, checked
        self.added_anyway = added_anyway
        self.views = {p: view for buffer in buffers for p, view in buffer.views.items()}
        self.place = {
            p: (buffer, bucket) for buffer in buffers for bucket in buffer.buckets for p in bucket.parameters
        }
        #: parameters whose next gradient is the last of the step
        self.last: dict[nn.Parameter, None] = {}
        self.sent: Counter[GradientBuffer] = Counter()
        placeholders = Placeholders()
        for p, view in self.views.items():
            if fused and p.ndim > 1:
                fuse_accumulation(p, view, placeholders)
                p.zero_out_wgrad = p in added_anyway  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(weakly(self._arrived))
        self.zero()

    def zero(self) -> None:
        """Before a step."""
        self.last.clear()
        self.sent.clear()
        for buffer in self.buffers:
            buffer.gradients.zero_()
            for bucket in buffer.buckets:
                bucket.missing = set(bucket.parameters)
        for p in self.views:
            p.grad = None
            p.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def expect_last(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note, before a backward, that it is the step's last one to make gradients of these parameters."""
        self.last |= dict.fromkeys(parameters)

    def finish(self) -> None:
        """After the last backward: sum, or wait for the sums."""
        buckets = [bucket for buffer in self.buffers for bucket in buffer.buckets]
        assert not any(bucket.missing for bucket in buckets), "backward gave no gradient for some parameters"
        for bucket in buckets:
            if not self.overlapped:
                self._reduce(bucket)
            bucket.wait()
            bucket.sum_over_instances()

    def _arrived(self, p: nn.Parameter) -> None:
        if p.grad is not None and (not p.grad_added_to_main_grad or p in self.added_anyway):  # type: ignore[attr-defined]
            self.views[p].add_(p.grad)
        p.grad = None
        p.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if p not in self.last:
            return
        buffer, bucket = self.place[p]
        bucket.missing.remove(p)
        while self.overlapped and self.sent[buffer] < len(buffer.buckets):
            ready = buffer.buckets[self.sent[buffer]]
            if ready.missing:
                return
            self._reduce(ready)
            self.sent[buffer] += 1

    def _reduce(self, bucket: GradientBucket) -> None:
        if self.checked:
            bucket.check()
        bucket.reduce(overlapped=self.overlapped)


class GatheredInForward:
    """Gathers each bucket before a module needs it, and then begins with the next bucket of its buffer.

    Megatron-Core gathers, before each module, the module's own parameters. Models here use weights of modules
    that they do not call (a head). So all parameters of a block (of ``blocks``) are gathered before it, those
    registered before the blocks before the model, and the others after the last block; a model without blocks
    gathers all before it.

    Args:
        modules: the models, each a run of layers.
        buffers: sharded buffers of their parameters.
    """

    def __init__(self, modules: Iterable[nn.Module], buffers: Sequence[GradientBuffer]):
        self.bucket_of = {p: each for buffer in buffers for each in buffer.buckets for p in each.parameters}
        # from a buffer's last bucket on: parameters lie in reverse
        self.next = {bucket: after for buffer in buffers for after, bucket in pairwise(buffer.buckets)}
        self.begun: set[GradientBucket] = set()
        gather = weakly(self.gather)
        for module in modules:
            for hooked, hook, parameters in _needs(module):
                hook(hooked, _with(gather, parameters))

    def forget(self) -> None:
        """Called after an update: gathered weights are out of date."""
        self.begun.clear()

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to gather these, in the order of their buckets."""
        for bucket in self._buckets(parameters):
            self._begin(bucket)

    def gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather these."""
        for bucket in self._buckets(parameters):
            self._begin(bucket)
            if bucket.work is not None:
                bucket.wait()
                if bucket in self.next:
                    self._begin(self.next[bucket])

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterable[GradientBucket]:
        """The buckets of trained parameters; frozen ones are whole on every rank, and have no bucket."""
        return dict.fromkeys(self.bucket_of[p] for p in parameters if p.requires_grad)

    def _begin(self, bucket: GradientBucket) -> None:
        if bucket not in self.begun:
            self.begun.add(bucket)
            bucket.gather(overlapped=True)


Hook = Callable[..., None]
Need = tuple[nn.Module, Callable[[nn.Module, Hook], Any], list[nn.Parameter]]


def _needs(module: nn.Module) -> Iterator[Need]:
    """The modules that gather parameters as they run: the module, how its hook is registered, and which
    parameters must be whole there."""
    blocks = [*getattr(module, "blocks", nn.ModuleDict()).values()]
    within = {p for block in blocks for p in block.parameters()}
    order = list(module.parameters())
    first = next((i for i, p in enumerate(order) if p in within), len(order))
    yield module, nn.Module.register_forward_pre_hook, order[:first]
    for block in blocks:
        yield block, nn.Module.register_forward_pre_hook, list(block.parameters())
    if blocks:
        after = [p for p in order[first:] if p not in within]
        yield blocks[-1], nn.Module.register_forward_hook, after


def _with(gather: Hook, parameters: list[nn.Parameter]) -> Hook:
    """A module's hook that gathers these, whatever it is called with."""
    return lambda *_: gather(parameters)
