"""ZeRO-1 (Rajbhandari et al., arXiv 1910.02054, section 5): gradients as under DDP, the optimizer sharded.

A rank updates its shard of the float32 masters and all-gathers the weights, which are views of one flat
tensor. With ``shards: whole`` ranks update whole parameters, so that shards are uneven, and each rank
broadcasts its own in turn, as in InternEvo's HybridZeroOptimizer and in torch's ZeroRedundancyOptimizer,
which has no master weights.

With ``optimizer: host``, as in DeepSpeed's offload_optimizer of ZeRO-1, the device has no copy of a shard. A
gradient's part is copied to the host in float32, and the shard comes back into the flat tensor.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.buckets import BucketedGradients, in_buckets
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.flat import FlatShard, covered, owners_of, padded, whole_lengths
from spbench.impls.backends.host_optimizer import HostOptimizer
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.optimizer_options import DEEPSPEED_STAGE_1, OptimizerOptions
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.collectives import all_gather_flat, all_gather_in_place
from spbench.impls.composition import by_partial_axes, summed_axes, trained_parameters
from spbench.impls.kernels.host_copies import to_host_
from spbench.impls.rings import wait_for_device
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class ShardedOptimizerOptions(OptimizerOptions):
    """Options of :class:`ShardedOptimizer`.

    Attributes:
        shards: "even": shards of equal lengths, all-gathered; "whole": shards of whole parameters, broadcast
            rank by rank after the host has waited for the updates.

    Raises:
        ValueError: an option has another word, or ``shards: whole`` is set with an optimizer on the host.
    """

    shards: Literal["even", "whole"] = "even"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards == "whole" and self.optimizer == "host":
            raise ValueError("shards: whole needs optimizer: device; leave one of these out")


class ShardedOptimizer(DistributedDataParallel):
    """Gradients in buckets, whole on every rank; masters and moments of a shard alone."""

    name = "zero1"
    shares_out = frozenset({"optimizer_state"})
    options_type = ShardedOptimizerOptions
    options: ShardedOptimizerOptions

    def prepare(self) -> Optimizer:
        sums = list(self.summed())
        self.units, self.flats = [], []
        for group, parameters in sums:
            # if the host has the masters, the device's shard is only a view of the flat tensor
            held = replace(self.precision, master=False) if self.on_host else self.precision
            by_name = {self.names[p]: p for p in parameters}
            unit = FlatShard(by_name, group, held, whole=self.options.shards == "whole")
            flat = unit.flattened([by_name[name] for name in unit.names])
            for name, view in unit.views(flat).items():
                by_name[name].data = view
            if self.on_host:
                unit.weights = unit.shards(flat)[unit.rank]
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
        host = self.optimizer if isinstance(self.optimizer, HostOptimizer) else None
        for number, unit in enumerate(self.units):
            shard = unit.gradient if host is None else host.gradient(number)
            assert shard is not None
            for name, part in unit.parts(shard).items():
                gradient = self.parameters[name].grad
                assert gradient is not None
                if host is None:
                    part.values.copy_(part.of(gradient))
                else:
                    to_host_(part.values, part.of(gradient).to(part.values.dtype))
            if host is None:
                unit.weights.grad = shard.to(unit.weights.dtype)
        super().step()
        for unit, flat in zip(self.units, self.flats, strict=True):
            if host is not None:  # which has updated the shard within the flat tensor
                if unit.group is not None:
                    all_gather_in_place(flat, unit.group, begin=False)
                continue
            weights = unit.weights.to(self.precision.parameters)
            if unit.group is None:
                flat.copy_(weights)
            elif self.options.shards == "whole":
                self._broadcast(unit, weights, flat)
            else:
                all_gather_flat(weights, unit.group, into=flat)

    def _broadcast(self, unit: FlatShard, weights: Tensor, flat: Tensor) -> None:
        """Broadcast each rank's updated weights into the flat tensor of all weights, rank by rank."""
        shards = unit.shards(flat)
        shards[unit.rank].copy_(weights)
        wait_for_device(flat)
        for rank, shard in enumerate(shards):
            if shard.numel():
                dist.broadcast(shard, group=unit.group, group_src=rank)

    def held(self) -> dict[str, list[Tensor]]:
        shards = [x for unit in self.units for x in (unit.weights, unit.gradient) if x is not None]
        return {**super().held(), "optimizer_state": [*shards, *self.optimizer.tensors()]}

    @classmethod
    def cuts(cls, step: PlannedStep) -> Hashable:
        assert isinstance(step.options, ShardedOptimizerOptions)
        found: list[Hashable] = []
        module = step.build().to(step.precision.parameters)
        for axes, parameters in by_partial_axes(trained_parameters(module), step.strategy).items():
            place, sizes = step.around.place, [p.numel() for p in parameters]
            summed = summed_axes(axes)
            ranks, rank = place.size(*summed), place.rank(*summed)
            whole, ends = padded(sum(sizes), ranks), [*accumulate(sizes)]
            each = whole // ranks
            part = covered([0, *ends[:-1]], ends, rank * each, (rank + 1) * each)
            buckets = {tuple(p.numel() for p in bucket) for bucket in in_buckets(parameters)}
            if step.options.shards == "whole":
                part = (tuple(owners_of(sizes, ranks)), rank)
            found.append((axes, whole - sum(sizes), part, frozenset(buckets)))
        return tuple(found)

    @classmethod
    def shares_whole_weights(cls, options: Any) -> bool:
        return bool(options.shards == "whole")

    @classmethod
    def whole_weights(cls, module: nn.Module, parameters: list[nn.Parameter], ranks: int) -> Counter[int]:
        return whole_lengths([p.numel() for p in parameters], ranks)

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        assert isinstance(step.options, ShardedOptimizerOptions)
        for summed in step.summed:
            payload = summed.elements * step.element_bytes
            yield Traffic("backward", "gradients, all buckets", "all_reduce", 1, payload, summed.group_axes)
            kind, whole = "broadcast", payload
            if step.options.shards == "even":
                kind, whole = "all_gather", padded(summed.elements, summed.size) * step.element_bytes
            yield Traffic("optimizer", "updated weights", kind, 1, whole, summed.group_axes)
            if step.precision.loss_scale:
                yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, summed.group_axes)
