"""Backends whose states are on the host, with a planted fault each. None is found by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.fsdp_flat import FlatFullySharded
from spbench.impls.backends.fully_shard import FullySharded
from spbench.impls.backends.host_adam import HostAdam
from spbench.impls.backends.host_optimizer import HostOptimizer
from spbench.impls.backends.host_shards import HostShards
from spbench.impls.backends.megatron import Megatron
from spbench.impls.backends.optimizer import Optimizer


class HookNeverFires(FullySharded):
    """Of one parameter."""

    def _reduced(self, p: Any) -> None:
        if self.numbers[p] != 2:
            super()._reduced(p)
        else:
            p.grad = None


class HookFiresTwice(FullySharded):
    """For one parameter."""

    def _reduced(self, p: Any) -> None:
        gradient, last = p.grad, self.last
        if self.numbers[p] == 2:
            self.last = False
            super()._reduced(p)
            p.grad, self.last = gradient, last
        super()._reduced(p)


class MicroBatchesNotSummed(FullySharded):
    """The last one's gradient takes the place of the others'."""

    def _reduced(self, p: Any) -> None:
        assert self.host is not None
        self.host.begin()
        super()._reduced(p)


def _planted(optimizer: Optimizer, **methods: Any) -> Optimizer:
    for name, method in methods.items():
        setattr(optimizer, name, method)
    return optimizer


def _nothing(number: int) -> None:
    """Send nothing back."""


class ShardsNotSentBack(FullySharded):
    def prepare(self) -> Optimizer:
        return _planted(super().prepare(), updated=_nothing)


class WeightsNotSentBack(DistributedDataParallel):
    def prepare(self) -> Optimizer:
        return _planted(super().prepare(), updated=_nothing)


class MainWeightsNotSentBack(Megatron):
    def prepare(self) -> Optimizer:
        return _planted(super().prepare(), updated=_nothing)


class GradientsOfTheStepBefore(FullySharded):
    """The host updates with what it had before; in the first step with what it is given."""

    def synchronize(self) -> None:
        super().synchronize()
        assert isinstance(self.host, HostOptimizer | HostShards)
        new = [shard.grad.clone() for shard in self.host.masters if shard.grad is not None]
        for shard, old in zip(self.host.masters, getattr(self, "before", new), strict=True):
            assert shard.grad is not None
            shard.grad.copy_(old)
        self.before = new


class FlatGradientOfTheStepBefore(FlatFullySharded):
    """Its copy to the host is left out after the first step."""

    def synchronize(self) -> None:
        assert isinstance(self.optimizer, HostAdam)
        before: list[Tensor | None] = [shard.grad for shard in self.optimizer.masters]
        kept = [x.clone() for x in before if x is not None] if hasattr(self, "stepped") else None
        super().synchronize()
        self.stepped = True
        for x, old in zip(before, kept or [], strict=False):
            assert x is not None
            x.copy_(old)
