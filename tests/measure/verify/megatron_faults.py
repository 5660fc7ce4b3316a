"""The backend ``megatron`` with a planted fault each. None is found by name."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor, nn

from spbench.impls.backends.main_gradients import GradientBucket, MainGradients
from spbench.impls.backends.megatron import Megatron
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.weight_gathering import GatheredInForward


class GradientsNotSummed(Megatron):
    """Each rank keeps what its own backward has made."""

    def synchronize(self) -> None:
        with mock.patch.object(GradientBucket, "reduce"):
            super().synchronize()


class InstancesNotSummed(Megatron):
    """Each instance of the optimizer updates with the sums over its own ranks."""

    def synchronize(self) -> None:
        with mock.patch.object(GradientBucket, "sum_over_instances"):
            super().synchronize()


class LastMicroBatchAlone(Megatron):
    """A gradient takes the place of those of earlier micro-batches."""

    def prepare(self) -> Optimizer:
        optimizer = super().prepare()
        for p in self.names:
            p.register_hook(lambda gradient, p=p: self._forget(gradient, p))
        return optimizer

    def _forget(self, gradient: Tensor, p: nn.Parameter) -> None:
        self.gradients.views[p].zero_()


class _Lenient(set[nn.Parameter]):
    """Lets go of a parameter more than once."""

    def remove(self, p: nn.Parameter) -> None:
        self.discard(p)


def _at_once(bucket: GradientBucket, **how: Any) -> None:
    GradientBucket.reduce(bucket, overlapped=False)


class SentBeforeTheLastMicroBatch(Megatron):
    """The sum over ranks begins when the first micro-batch has made a bucket's gradients."""

    def zero(self) -> None:
        super().zero()
        self.gradients.expect_last(self.names)
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.missing = _Lenient(bucket.missing)
                # done at once, or it may still run when the next micro-batch adds its gradients
                bucket.reduce = partial(_at_once, bucket)  # type: ignore[method-assign]


class WeightsNotGathered(Megatron):
    """Of the updated weights a rank sees its own part only."""

    def step(self) -> None:
        with mock.patch.object(GradientBucket, "gather"):
            super().step()


class WeightsNotGatheredInForward(Megatron):
    """A bucket that was gathered in the first step is not gathered again."""

    def zero(self) -> None:
        with mock.patch.object(GatheredInForward, "forget"):
            super().zero()


class UpdatedFromTheNextElement(Megatron):
    """Gradients are taken from one element further on."""

    def step(self) -> None:
        for main in self.mains:
            main.gradient.copy_(main.gradient.roll(-1))
        super().step()


class TiedEmbeddingNotSummed(Megatron):
    """The first and the last stage keep the gradients of their own copies."""

    def synchronize(self) -> None:
        self.gradients.finish()


class FlagIgnored(MainGradients):
    """What a layer has added to the main gradient itself is added again."""

    def _arrived(self, p: nn.Parameter) -> None:
        p.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        super()._arrived(p)
