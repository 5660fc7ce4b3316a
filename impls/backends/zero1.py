"""ZeRO-1 (Rajbhandari et al., arXiv 1910.02054, section 5): gradients as under DDP, the optimizer shared out.

A rank updates its shard of the float32 masters and all-gathers the weights, which are views of one flat
tensor. torch's ZeroRedundancyOptimizer gives whole parameters to ranks, so shards are uneven, and knows no
master weights.

With ``optimizer: host`` as DeepSpeed's offload_optimizer of ZeRO-1 has it: the device has no copy of a shard,
a gradient's part is copied to the host, wide, and the shard comes back into the flat tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from spbench.impls.backends.backend import PlannedStep
from spbench.impls.backends.buckets import BucketedGradients, in_buckets
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.flat import FlatShard, covered, padded
from spbench.impls.backends.host_layout import DEEPSPEED_STAGE_1
from spbench.impls.backends.host_optimizer import HostOptimizer
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.collectives import all_gather_flat, all_gather_in_place
from spbench.impls.composition import by_partial_axes
from spbench.impls.kernels.host_copies import to_host_
from spbench.impls.traffic import Traffic


class ShardedOptimizer(DistributedDataParallel):
    """Gradients in buckets, whole on every rank; masters and moments of a shard alone."""

    name = "zero1"
    shares_out = frozenset({"optimizer_state"})

    def prepare(self) -> Optimizer:
        sums = list(self.summed())
        self.units, self.flats = [], []
        for group, parameters in sums:
            # where the host has the masters, the device's shard is a part of the flat tensor alone
            held = replace(self.precision, master=False) if self.on_host else self.precision
            unit = FlatShard({self.names[p]: p for p in parameters}, group, held)
            flat = unit.flattened(parameters)
            for p, view in zip(parameters, unit.views(flat).values(), strict=True):
                p.data = view
            if self.on_host:
                unit.weights = flat.chunk(unit.size)[unit.rank]
            else:
                unit.gradient = torch.zeros_like(unit.weights)
            self.units.append(unit)
            self.flats.append(flat)
        self.parameters = {name: p for p, name in self.names.items()}
        self.buckets = BucketedGradients(sums, list(self.names))
        shards = [unit.weights for unit in self.units]
        if self.on_host and shards:
            settings = self.optimizer_settings([unit.group for unit in self.units])
            return HostOptimizer(shards, self.precision, DEEPSPEED_STAGE_1, **settings)
        # the masters
        return self.make_optimizer(shards, masters=False, shard_groups=[unit.group for unit in self.units])

    def step(self) -> None:
        if isinstance(self.optimizer, HostOptimizer):
            self._step_on_host(self.optimizer)
            return
        for unit in self.units:
            assert unit.gradient is not None
            for name, part in unit.parts(unit.gradient).items():
                gradient = self.parameters[name].grad
                assert gradient is not None
                part.values.copy_(part.of(gradient))
            unit.weights.grad = unit.gradient
        super().step()
        for unit, flat in zip(self.units, self.flats, strict=True):
            weights = unit.weights.to(self.precision.parameters)
            if unit.group is None:
                flat.copy_(weights)
            else:
                all_gather_flat(weights, unit.group, into=flat)

    def _step_on_host(self, optimizer: HostOptimizer) -> None:
        for number, unit in enumerate(self.units):
            for name, part in unit.parts(optimizer.gradient(number)).items():
                gradient = self.parameters[name].grad
                assert gradient is not None
                to_host_(part.values, part.of(gradient).to(part.values.dtype))
        optimizer.step()
        for unit, flat in zip(self.units, self.flats, strict=True):
            if unit.group is not None:
                all_gather_in_place(flat, unit.group, begin=False)

    def held(self) -> dict[str, list[Tensor]]:
        shards = [x for unit in self.units for x in (unit.weights, unit.gradient) if x is not None]
        return {**super().held(), "optimizer_state": [*shards, *self.optimizer.tensors()]}

    @classmethod
    def cuts(cls, step: PlannedStep) -> Hashable:
        found = []
        module = step.build().to(step.precision.parameters)
        for axes, parameters in by_partial_axes(module.parameters(), step.strategy).items():
            place, sizes = step.around.place, [p.numel() for p in parameters]
            ranks, rank = place.size("dp", *axes), place.rank("dp", *axes)
            whole, ends = padded(sum(sizes), ranks), [*accumulate(sizes)]
            each = whole // ranks
            part = covered([0, *ends[:-1]], ends, rank * each, (rank + 1) * each)
            buckets = {tuple(p.numel() for p in bucket) for bucket in in_buckets(parameters)}
            found.append((axes, whole - sum(sizes), part, frozenset(buckets)))
        return tuple(found)

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        for summed in step.summed:
            payload = summed.elements * step.element_bytes
            whole = padded(summed.elements, summed.size) * step.element_bytes
            yield Traffic("backward", "gradients, all buckets", "all_reduce", 1, payload, summed.group_axes)
            yield Traffic("optimizer", "updated weights", "all_gather", 1, whole, summed.group_axes)
            if step.precision.loss_scale:
                yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, summed.group_axes)
