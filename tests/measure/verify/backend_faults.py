"""Data-parallel backends with a planted fault each. None is a backend that is found by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from spbench.impls.backends import fsdp_flat
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.flat import FlatShard
from spbench.impls.backends.fsdp_flat import FlatFullySharded
from spbench.impls.backends.fully_shard import FullySharded, KeptAfterForward
from spbench.impls.backends.zero1 import ShardedOptimizer
from spbench.impls.composition import by_partial_axes


class ReplicasNotSummed(DistributedDataParallel):
    def summed(self) -> Iterator[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]:
        for axes, parameters in by_partial_axes(self.names, self.strategy).items():
            yield self.strategy.place.group(*axes), parameters


class WeightsNotGathered(ShardedOptimizer):
    """Of the updated weights a rank sees its own only."""

    def step(self) -> None:
        before = [flat.clone() for flat in self.flats]
        super().step()
        for unit, flat, old in zip(self.units, self.flats, before, strict=True):
            mine = slice(unit.start, unit.start + len(unit.weights))
            old[mine] = flat[mine]
            flat.copy_(old)


class UpdatesTheNextShard(ShardedOptimizer):
    """Gradients are taken from one element further on."""

    def step(self) -> None:
        for gradient in (p.grad for p in self.names):
            assert gradient is not None
            gradient.copy_(gradient.flatten().roll(-1).view_as(gradient))
        super().step()


def _own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size())[group.rank()].clone()


class FlatGradientNotSummed(FlatFullySharded):
    def _scatter(self, unit: FlatShard, flat: Tensor) -> None:
        with mock.patch.object(fsdp_flat, "reduce_scatter_flat", _own_part):
            super()._scatter(unit, flat)


class GradientNotSummed(FullySharded):
    def _wrap(self) -> None:
        super()._wrap()

        def scatter(comm: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, **how: Any) -> None:
            output_tensor.copy_(_own_part(input_tensor, group))

        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                for unit in module._get_fsdp_state()._fsdp_param_groups:
                    comm = unit._reduce_scatter_comm
                    unit._reduce_scatter_comm = type("Comm", (type(comm),), {"__call__": scatter})()


class MeanOverRanks(FullySharded):
    """As torch has it by default, for losses that are means over replicas."""

    def _wrap(self) -> None:
        super()._wrap()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(max(m.size() for m in self.meshes.values())))


class WeightsNotGatheredAnew(KeptAfterForward):
    """What forward has gathered stays beyond the update."""

    def _wrap(self) -> None:
        super()._wrap()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_backward(False, recurse=False)
