"""Main gradients: contiguous buffers into which backward's gradients are added, as in Megatron-Core's
DistributedDataParallel (core/distributed/param_and_grad_buffer.py).

A buffer is allocated once and never freed. Each gradient that autograd makes is added to the parameter's part
of the buffer and freed, so only one gradient in the weights' precision exists at a time.
Buckets of the buffer are summed over the group, or sharded: reduce-scattered in place.

:class:`GatheredInForward` gathers updated weights bucket by bucket as the next forward needs them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls import collectives
from spbench.impls.backends.buckets import weakly
from spbench.impls.backends.buffer_layout import BucketLayout
from spbench.impls.backends.planned_buffers import keep_in_eight_bits
from spbench.impls.kernels.projection import Placeholders, fuse_accumulation
from spbench.impls.rings import wait_for_device

#: Megatron-Core divides a bucket by the ranks of the group, in a pass that takes time. In spbench losses are
#: shares of one sum over all ranks, so the same pass multiplies by 1. Megatron-Core divides gradients of
#: experts by all replicas, so a rank whose experts no other rank has takes the pass too
GRADIENT_SCALE = 1.0


class GradientBucket:
    """A bucket of a :class:`GradientBuffer`.

    Attributes:
        parameters: the bucket's parameters, in the order of the buffer.
        gradients, weights: the bucket's elements [n] of the two buffers; ``weights`` is None if weights are
            not sharded.
        own: start and end, in the bucket, of the part that this rank holds.
        scaled: whether :meth:`reduce` scales gradients even if no other rank has them.
        instances: the ranks that hold the same part; None: only this rank.
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
        """The slice of the flattened parameter p that lies in this rank's part; empty if none of it does."""
        first, last = (edge - self.starts[p] for edge in self.own)
        return slice(min(max(first, 0), p.numel()), min(max(last, 0), p.numel()))

    def of(self, whole: Tensor, p: nn.Parameter, elements: slice) -> Tensor:
        """The view of ``whole``, a tensor of all the bucket's elements [n], that holds ``elements`` of p."""
        return whole[self.starts[p] + elements.start : self.starts[p] + elements.stop]

    def check(self) -> None:
        """Compute the norm of the gradients and let the host wait for it, as in a check for NaN."""
        wait_for_device(self.gradients.norm(p=2))

    def reduce(self, *, overlapped: bool) -> None:
        """Sum the gradients over the group, in place: all of them or, if they are sharded, this rank's part.
        If ``overlapped``, only begin the sum, which :meth:`wait` ends."""
        if self.group is not None or self.scaled:
            self.gradients.mul_(GRADIENT_SCALE)
        if self.group is None:
            return
        if self.weights is not None:
            self.work = collectives.reduce_scatter_in_place(self.gradients, self.group, begin=overlapped)
        elif overlapped:
            self.work = collectives.all_reduce_async(self.gradients, self.group)
        else:
            collectives.all_reduce(self.gradients, self.group)

    def sum_over_instances(self) -> None:
        """After :meth:`reduce` and :meth:`wait`: sum this rank's part over the instances."""
        if self.instances is not None:
            collectives.all_reduce(self.gradients[slice(*self.own)], self.instances)

    def gather(self, *, overlapped: bool) -> None:
        """All-gather the weights of all ranks' parts, in place; ``overlapped`` as in :meth:`reduce`."""
        if self.group is not None and self.weights is not None:
            self.work = collectives.all_gather_in_place(self.weights, self.group, begin=overlapped)

    def wait(self) -> None:
        """Wait for the collective that :meth:`reduce` or :meth:`gather` began."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class GradientBuffer:
    """The main gradients of the parameters that are summed over one group. If gradients are sharded, the
    weights are views of one contiguous buffer too.

    Args:
        group: the ranks that sum gradients, or share each bucket if buckets are sharded; None: only this
            rank.
        dtype: the dtype of the gradients.
        layouts: the layouts of the buckets.
        sharded: whether each rank holds a part of every bucket.
        instances: the ranks of other such groups that hold the same parts; None: there is one group.
        scaled: see :class:`GradientBucket`.
        eight_bits: whether the buffer of weights holds bytes; see :func:`keep_in_eight_bits`.
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
    """Adds gradients to buffers while backward makes them, and sums the buffers over ranks.

    Args:
        overlapped: sum a bucket as soon as the last backward, announced by :meth:`expect_last`, has made all
            its gradients, the buckets of a buffer one after another. Else all buckets are summed at the end.
        fused: set each matrix's attribute ``main_grad`` to its main gradient. A linear layer that adds its
            gradient there sets the parameter's ``grad_added_to_main_grad``; the placeholder that autograd
            then gets is dropped.
        checked: compute the norm of each bucket before its sum.
        added_anyway: parameters with several uses, whose gradients autograd adds up. That sum is added to the
            main gradient even if one use has added its gradient to the main gradient itself. For these
            parameters ``zero_out_wgrad`` is set, and such a layer gives autograd zeros.
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
        """Before a step: set buffers to zero, and expect a gradient for each parameter."""
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
        """Note that the next backward is the step's last one to make gradients of these parameters."""
        self.last |= dict.fromkeys(parameters)

    def finish(self) -> None:
        """After the last backward: sum all buckets, or wait for the sums that are under way."""
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
        if p in self.last and not hasattr(p, "spbench_put_off"):
            self.complete(p)

    def complete(self, p: nn.Parameter) -> None:
        """Note that the main gradient of p is whole, and sum the buckets that are complete, if overlapped."""
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

    Megatron-Core gathers, before each module, the module's own parameters. Models in spbench use weights of
    modules that they do not call (a head). So all parameters of a block (of ``blocks``) are gathered before
    the block, those registered before the blocks are gathered before the model, and the others after the last
    block; a model without blocks gathers all parameters first.

    Args:
        modules: the modules of the rank's stages, each a run of layers.
        buffers: the sharded buffers of the modules' parameters.
    """

    def __init__(self, modules: Iterable[nn.Module], buffers: Sequence[GradientBuffer]):
        self.bucket_of = {p: each for buffer in buffers for each in buffer.buckets for p in each.parameters}
        # from a buffer's last bucket on, because parameters lie in reverse
        self.next = {bucket: after for buffer in buffers for after, bucket in pairwise(buffer.buckets)}
        self.begun: set[GradientBucket] = set()
        gather = weakly(self.gather)
        for module in modules:
            for hooked, hook, parameters in _needs(module):
                hook(hooked, _with(gather, parameters))

    def forget(self) -> None:
        """Called after an update: mark all gathered weights as out of date."""
        self.begun.clear()

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to gather these parameters, in the order of their buckets."""
        for bucket in self._buckets(parameters):
            self._begin(bucket)

    def gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather these parameters and wait for them; begin with the next bucket of each buffer."""
        for bucket in self._buckets(parameters):
            self._begin(bucket)
            if bucket.work is not None:
                bucket.wait()
                if bucket in self.next:
                    self._begin(self.next[bucket])

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterable[GradientBucket]:
        """The buckets of the trained parameters; frozen parameters have none, as every rank has them
        whole."""
        return dict.fromkeys(self.bucket_of[p] for p in parameters if p.requires_grad)

    def _begin(self, bucket: GradientBucket) -> None:
        if bucket not in self.begun:
            self.begun.add(bucket)
            bucket.gather(overlapped=True)


Hook = Callable[..., None]
Need = tuple[nn.Module, Callable[[nn.Module, Hook], Any], list[nn.Parameter]]


def _needs(module: nn.Module) -> Iterator[Need]:
    """Yields (module, function that registers its hook, parameters that must be whole when the hook runs)."""
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
    """A module's hook that gathers these parameters and ignores its own arguments."""
    return lambda *_: gather(parameters)
