"""Data-parallel backends with a planted fault each. None is a backend that is found by name."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from spbench.impls.backends import fsdp_flat, megatron_options
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.deepspeed_zero2 import DeepSpeedZero1, DeepSpeedZero2
from spbench.impls.backends.fsdp_flat import FlatFullySharded
from spbench.impls.backends.fully_shard import FullySharded, KeptAfterForward
from spbench.impls.backends.main_gradients import GatheredInForward, GradientBucket, MainGradients
from spbench.impls.backends.megatron import Megatron
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.zero1 import ShardedOptimizer
from spbench.impls.composition import by_partial_axes
from spbench.impls.layout import is_expert
from tests.measure.verify.planting import patching, planted

# DDP, ZeRO-1 and flat FSDP


def _own_axes_alone(self: Any, honest: Any) -> Iterator[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]:
    for axes, parameters in by_partial_axes(self.names, self.strategy).items():
        yield self.strategy.place.group(*axes), parameters


def _own_weights_alone(self: Any, honest: Callable[[], None]) -> None:
    """A rank sees its own updated weights only."""
    before = [flat.clone() for flat in self.flats]
    honest()
    for unit, flat, old in zip(self.units, self.flats, before, strict=True):
        mine = slice(unit.start, unit.start + len(unit.weights))
        old[mine] = flat[mine]
        flat.copy_(old)


def _one_element_further(self: Any, honest: Callable[[], None]) -> None:
    """Gradients are taken from one element further on."""
    for gradient in (p.grad for p in self.names):
        gradient.copy_(gradient.flatten().roll(-1).view_as(gradient))
    honest()


def _own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size())[group.rank()].clone()


ReplicasNotSummed = planted(DistributedDataParallel, summed=_own_axes_alone)
WeightsNotGathered = planted(ShardedOptimizer, step=_own_weights_alone)
UpdatesTheNextShard = planted(ShardedOptimizer, step=_one_element_further)
FlatGradientNotSummed = planted(FlatFullySharded, _scatter=patching(fsdp_flat, reduce_scatter_flat=_own_part))


# torch's fully_shard


def _wrapped(change: Callable[[Any, Any], None]) -> Callable[..., None]:
    """Each module that fully_shard has wrapped is changed."""

    def wrap(self: Any, honest: Callable[[], None]) -> None:
        honest()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                change(self, module)

    return wrap


def _scatter_without_sum(self: Any, module: Any) -> None:
    def scatter(comm: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, **how: Any) -> None:
        output_tensor.copy_(_own_part(input_tensor, group))

    for unit in module._get_fsdp_state()._fsdp_param_groups:
        kind = type(unit._reduce_scatter_comm)
        unit._reduce_scatter_comm = type("Comm", (kind,), {"__call__": scatter})()


def _divide_by_ranks(self: Any, module: Any) -> None:
    module.set_gradient_divide_factor(float(max(m.size() for m in self.meshes.values())))


def _keep_after_backward(self: Any, module: Any) -> None:
    module.set_reshard_after_backward(False, recurse=False)


GradientNotSummed = planted(FullySharded, _wrap=_wrapped(_scatter_without_sum))
# as torch has it by default, for losses that are means over replicas
MeanOverRanks = planted(FullySharded, _wrap=_wrapped(_divide_by_ranks))
# what forward has gathered stays beyond the update
WeightsNotGatheredAnew = planted(KeptAfterForward, _wrap=_wrapped(_keep_after_backward))


# states on the host


def _hook_never_fires(self: Any, honest: Callable[[Any], None], p: Any) -> None:
    """That of one parameter."""
    if self.numbers[p] != 2:
        honest(p)
    else:
        p.grad = None


def _hook_fires_twice(self: Any, honest: Callable[[Any], None], p: Any) -> None:
    """For one parameter."""
    gradient, last = p.grad, self.last
    if self.numbers[p] == 2:
        self.last = False
        honest(p)
        p.grad, self.last = gradient, last
    honest(p)


def _last_alone(self: Any, honest: Callable[[Any], None], p: Any) -> None:
    """The last micro-batch's gradient takes the place of the others'."""
    self.host.begin()
    honest(p)


def _nothing_sent_back(self: Any, honest: Callable[[], Optimizer]) -> Optimizer:
    optimizer = honest()
    optimizer.updated = lambda number: None  # type: ignore[attr-defined]
    return optimizer


def _gradients_before(self: Any, honest: Callable[[], None]) -> None:
    """The host updates with what it had before; in the first step with what it is given."""
    honest()
    new = [shard.grad.clone() for shard in self.host.masters if shard.grad is not None]
    for shard, old in zip(self.host.masters, getattr(self, "before", new), strict=True):
        shard.grad.copy_(old)
    self.before = new


def _flat_gradients_before(self: Any, honest: Callable[[], None]) -> None:
    """The copy of gradients to the host is left out after the first step."""
    before = [shard.grad for shard in self.optimizer.masters]
    kept = [x.clone() for x in before if x is not None] if hasattr(self, "stepped") else []
    honest()
    self.stepped = True
    for x, old in zip(before, kept, strict=False):
        x.copy_(old)


HookNeverFires = planted(FullySharded, _reduced=_hook_never_fires)
HookFiresTwice = planted(FullySharded, _reduced=_hook_fires_twice)
MicroBatchesNotSummed = planted(FullySharded, _reduced=_last_alone)
ShardsNotSentBack = planted(FullySharded, prepare=_nothing_sent_back)
WeightsNotSentBack = planted(DistributedDataParallel, prepare=_nothing_sent_back)
MainWeightsNotSentBack = planted(Megatron, prepare=_nothing_sent_back)
GradientsOfTheStepBefore = planted(FullySharded, synchronize=_gradients_before)
FlatGradientOfTheStepBefore = planted(FlatFullySharded, synchronize=_flat_gradients_before)


# Megatron's buffers of main gradients


def _nothing(*args: Any, **how: Any) -> None:
    """In place of a message."""


def _forgetting(self: Any, honest: Callable[[], Optimizer]) -> Optimizer:
    """A gradient takes the place of those of earlier micro-batches."""
    optimizer = honest()
    for p in self.names:
        p.register_hook(lambda gradient, p=p: _forget(self.gradients, p))
    return optimizer


def _forget(gradients: MainGradients, p: nn.Parameter) -> None:
    gradients.views[p].zero_()


class _Lenient(set[nn.Parameter]):
    """Lets go of a parameter more than once."""

    def remove(self, p: nn.Parameter) -> None:
        self.discard(p)


def _at_once(bucket: GradientBucket, **how: Any) -> None:
    GradientBucket.reduce(bucket, overlapped=False)


def _sent_at_first(self: Any, honest: Callable[[], None]) -> None:
    """The sum over ranks begins when the first micro-batch has made a bucket's gradients."""
    honest()
    self.gradients.expect_last(self.names)
    for buffer in self.buffers:
        for bucket in buffer.buckets:
            bucket.missing = _Lenient(bucket.missing)
            # done at once, or it may still run when the next micro-batch adds its gradients
            bucket.reduce = partial(_at_once, bucket)


def _main_one_element_further(self: Any, honest: Callable[[], None]) -> None:
    for main in self.mains:
        main.gradient.copy_(main.gradient.roll(-1))
    honest()


def _added_again(self: Any, honest: Callable[[Any], None], p: Any) -> None:
    """What a layer has added to the main gradient itself is added again."""
    p.grad_added_to_main_grad = False
    honest(p)


# each rank keeps what its own backward has made
GradientsNotSummed = planted(Megatron, synchronize=patching(GradientBucket, reduce=_nothing))
# each instance of the optimizer updates with the sums over its own ranks
InstancesNotSummed = planted(Megatron, synchronize=patching(GradientBucket, sum_over_instances=_nothing))
LastMicroBatchAlone = planted(Megatron, prepare=_forgetting)
SentBeforeTheLastMicroBatch = planted(Megatron, zero=_sent_at_first)
# of the updated weights a rank sees its own part only
PartsNotGathered = planted(Megatron, step=patching(GradientBucket, gather=_nothing))
# a bucket that was gathered in the first step is not gathered again
WeightsNotGatheredInForward = planted(Megatron, zero=patching(GatheredInForward, forget=_nothing))
# gradients are taken from one element further on
UpdatedFromTheNextElement = planted(Megatron, step=_main_one_element_further)
# the first and the last stage keep the gradients of their own copies
TiedEmbeddingNotSummed = planted(Megatron, synchronize=lambda self, honest: self.gradients.finish())
# the norm counts no experts (Megatron-LM #5916), or all that several ranks hold as often as they hold it
NormWithoutExperts = planted(
    Megatron, _shares=lambda _, honest, m: [(n, s * (not is_expert(m.parameter))) for n, s in honest(m)]
)
NormOfEveryCopy = planted(Megatron, _shares=lambda _, honest, main: [(n, 1.0) for n, share in honest(main)])
NormOfOneRank = planted(Megatron, step=patching(megatron_options, all_reduce=_nothing))
FlagIgnored = planted(MainGradients, _arrived=_added_again)


# DeepSpeed's buckets


def _twice(self: Any, honest: Callable[..., None], *message: Any) -> None:
    honest(*message)
    honest(*message)


def _border_one_further(self: Any, honest: Callable[[], Optimizer]) -> Optimizer:
    """The first rank owns one element more of the matrix that two ranks share, and one less of the vector."""
    optimizer = honest()
    for p, (group, cuts) in self.cuts_of.items():
        if len(cuts) > 1:
            (first, n), (second, m) = cuts
            more = 1 if p.dim() > 1 else -1
            self.cuts_of[p] = group, [(first, n + more), (second, m - more)]
    return optimizer


BucketSummedTwice = planted(DeepSpeedZero2, _sum=_twice)
LateBucketSummedTwice = planted(DeepSpeedZero1, _sum=_twice)
BorderOneFurther = planted(DeepSpeedZero2, prepare=_border_one_further)
