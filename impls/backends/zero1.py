"""ZeRO-1 (Rajbhandari et al., arXiv 1910.02054, section 5): gradients as under DDP, the optimizer sharded.

A rank updates its shard of the float32 masters and all-gathers the weights, which are views of one flat
tensor. With ``shards: whole`` ranks update whole parameters, so that shards are uneven, and each rank
broadcasts its own in turn, as in InternEvo's HybridZeroOptimizer and in torch's ZeroRedundancyOptimizer,
which has no master weights.

With ``gradients: late`` gradients are summed as in DeepSpeed's stage 1, see :class:`LateGradients`: a rank
holds no gradient while forward runs, and after backward only its shard.

With ``optimizer: host``, as in DeepSpeed's offload_optimizer of ZeRO-1, the device has no copy of a shard. A
gradient's part is copied to the host in float32, and the shard comes back into the flat tensor.

Late gradients stay whole until backward has ended, and are then summed in a buffer, as in DeepSpeed's ZeRO-1
without ``overlap_comm`` (runtime/zero/stage_1_and_2.py, commit c4b1a8c: ``reduce_gradients``,
``reduce_independent_p_g_buckets_and_remove_grads``).

Backward fills each parameter's ``.grad`` and sends nothing; forward has neither gradients nor a buffer. After
the last backward, gradients are copied into the buffer one after another and freed. When the next gradient
has no room, the buffer's content is summed, and the rank's part is taken out before the buffer is filled
again. A gradient larger than the buffer is summed in its own memory.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.backend import HeldPart
from spbench.impls.backends.buckets import BucketedGradients, in_buckets
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.flat import FlatShard, covered, owners_of, padded
from spbench.impls.backends.host_optimizer import HostOptimizer
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.optimizer_options import DEEPSPEED_STAGE_1, OptimizerOptions
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.collectives import all_gather_flat, all_gather_in_place, all_reduce
from spbench.impls.composition import by_partial_axes, summed_axes, trained_parameters
from spbench.impls.kernels.host_copies import to_host_
from spbench.impls.place import Place
from spbench.impls.rings import wait_for_device
from spbench.impls.traffic import Traffic

#: a function that takes a parameter and its summed, flat gradient
Take = Callable[[nn.Parameter, Tensor], None]


class LateGradients:
    """Sums whole gradients in a buffer after the last backward.

    Args:
        summed: parameters in the order of registration, by the group over which gradients are summed.
        elements: number of elements of the buffer.
    """

    def __init__(self, summed: Iterable[tuple[dist.ProcessGroup | None, list[nn.Parameter]]], elements: int):
        self.summed, self.elements = list(summed), elements
        #: exists from the beginning of the last backward until the gradients are summed
        self.buffer: Tensor | None = None

    def zero(self) -> None:
        """Before a step: free all gradients."""
        for _, parameters in self.summed:
            for p in parameters:
                p.grad = None

    def expect_last(self) -> None:
        """Allocate the buffer, before the last backward of a step through the model or one of its stages."""
        if self.buffer is None and self.summed:
            like = self.summed[0][1][0]
            self.buffer = torch.empty(self.elements, dtype=like.dtype, device=like.device)

    def finish(self, take: Take) -> None:
        """Sum each gradient over its group, after the last backward, and call ``take`` with the sum."""
        for group, parameters in self.summed:
            waiting: list[nn.Parameter] = []
            for p in parameters:
                if sum(x.numel() for x in (*waiting, p)) > self.elements:
                    self._sum(waiting, group, take)
                    waiting = []
                waiting.append(p)
            self._sum(waiting, group, take)
        self.buffer = None

    def _sum(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, take: Take) -> None:
        if not parameters:
            return
        sizes = [p.numel() for p in parameters]
        if sum(sizes) > self.elements:  # one gradient that is larger than the buffer
            whole = _gradient(parameters[0])
        else:
            assert self.buffer is not None, "no backward was said to be the last"
            whole = self.buffer[: sum(sizes)]
            for p, place in zip(parameters, whole.split(sizes), strict=True):
                place.copy_(_gradient(p))
                p.grad = None
        all_reduce(whole, group)
        for p, gradient in zip(parameters, whole.split(sizes), strict=True):
            take(p, gradient)
            p.grad = None


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None, "backward gave no gradient for some parameters"
    return p.grad.flatten()


@dataclass(frozen=True)
class ShardedOptimizerOptions(OptimizerOptions):
    """Options of :class:`ShardedOptimizer`.

    Attributes:
        gradients: "buckets": summed in backward, in buckets that are kept, as under DDP; "late": summed after
            backward, in a buffer, as in DeepSpeed.
        bucket_elements: elements of the buffer for "late" gradients, DeepSpeed's ``reduce_bucket_size``.
        shards: "even": shards of equal lengths, all-gathered; "whole": shards of whole parameters, broadcast
            rank by rank after the host has waited for the updates.

    Raises:
        ValueError: an option has another word, the buffer has no elements, or ``shards: whole`` is set with
            late gradients or an optimizer on the host.
    """

    gradients: Literal["buckets", "late"] = "buckets"
    bucket_elements: int = 500_000_000
    shards: Literal["even", "whole"] = "even"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards == "whole" and (self.gradients == "late" or self.optimizer == "host"):
            raise ValueError("shards: whole needs gradients: buckets and optimizer: device; leave these out")
        if self.bucket_elements < 1:
            raise ValueError(f"bucket_elements is at least 1, not {self.bucket_elements}")


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
            elif self.options.gradients == "buckets":
                unit.gradient = torch.zeros_like(unit.weights)
            self.units.append(unit)
            self.flats.append(flat)
        self.parameters = {name: p for p, name in self.names.items()}
        #: sums gradients after backward; None: buckets sum them in backward
        self.late: LateGradients | None = None
        if self.options.gradients == "late":
            self.late = LateGradients(sums, self.options.bucket_elements)
        else:
            self.buckets = BucketedGradients(sums, list(self.names))
        shards = [unit.weights for unit in self.units]
        if self.on_host and shards:
            settings = self.optimizer_settings([unit.group for unit in self.units])
            return HostOptimizer(shards, self.precision, DEEPSPEED_STAGE_1, **settings)
        # the masters
        return self.make_optimizer(shards, masters=False, shard_groups=[unit.group for unit in self.units])

    def zero(self) -> None:
        if self.late is None:
            super().zero()
            return
        self.late.zero()
        for unit in self.units:
            unit.gradient = None

    def begin_last_backward(self, stage: nn.Module) -> None:
        if self.late is None:
            super().begin_last_backward(stage)
        else:
            self.late.expect_last()

    def synchronize(self) -> None:
        if self.late is None:
            super().synchronize()
            return
        self.around.add_tied(self.module)
        if not self.on_host:
            for unit in self.units:
                unit.gradient = unit.weights.new_zeros(len(unit.weights), dtype=self.precision.parameters)
        parts = self._late_parts()

        def take(p: nn.Parameter, gradient: Tensor) -> None:
            part = parts.get(self.names[p])
            if part is not None and self.on_host:
                to_host_(part.values, part.of(gradient).to(part.values.dtype))
            elif part is not None:
                part.values.copy_(part.of(gradient))

        self.late.finish(take)

    def _late_parts(self) -> dict[str, HeldPart]:
        """The part of each late gradient that lies in this rank's shards, by parameter name."""
        parts, optimizer = {}, self.optimizer
        for number, unit in enumerate(self.units):
            held = optimizer.gradient(number) if isinstance(optimizer, HostOptimizer) else unit.gradient
            assert held is not None
            parts.update(unit.parts(held))
        return parts

    def step(self) -> None:
        if isinstance(self.optimizer, HostOptimizer):
            self._step_on_host(self.optimizer)
            return
        for unit in self.units:
            assert unit.gradient is not None
            if self.late is None:
                for name, part in unit.parts(unit.gradient).items():
                    gradient = self.parameters[name].grad
                    assert gradient is not None
                    part.values.copy_(part.of(gradient))
            unit.weights.grad = unit.gradient.to(unit.weights.dtype)
        super().step()
        if self.late is not None:
            for unit in self.units:
                unit.weights.grad = unit.gradient = None
        for unit, flat in zip(self.units, self.flats, strict=True):
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

    def _step_on_host(self, optimizer: HostOptimizer) -> None:
        for number, unit in enumerate(self.units if self.late is None else ()):
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

    def held_gradients(self) -> list[Tensor]:
        return super().held_gradients() if self.late is None else []

    def gradient_parts(self) -> dict[str, HeldPart]:
        if self.late is None:
            return super().gradient_parts()
        return self._late_parts()

    def gradient_places(self) -> dict[str, HeldPart]:
        if self.late is None:
            return super().gradient_places()
        return {name: part for unit in self.units for name, part in unit.parts(unit.weights).items()}

    @classmethod
    def cuts(cls, step: PlannedStep) -> Hashable:
        assert isinstance(step.options, ShardedOptimizerOptions)
        if step.options.gradients == "late":  # the buffer may hold gradients of any layers
            return step.shapes()
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
    def updated_elements(cls, step: PlannedStep, places: Sequence[Place]) -> list[int]:
        elements = [0] * len(places)
        for axes, parameters in by_partial_axes(trained_parameters(step.build()), step.strategy).items():
            summed, sizes = summed_axes(axes), [p.numel() for p in parameters]
            owners = owners_of(sizes, places[0].size(*summed))
            for number, place in enumerate(places):
                own = place.rank(*summed)
                elements[number] += sum(n for n, owner in zip(sizes, owners, strict=True) if owner == own)
        return elements

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        assert isinstance(step.options, ShardedOptimizerOptions)
        phase = "gradient_sync" if step.options.gradients == "late" else "backward"
        for summed in step.summed:
            payload = summed.elements * step.element_bytes
            whole = padded(summed.elements, summed.size) * step.element_bytes
            yield Traffic(phase, "gradients, all buckets", "all_reduce", 1, payload, summed.group_axes)
            if step.options.shards == "whole":
                whole = summed.elements * step.element_bytes
                yield Traffic("optimizer", "updated weights", "broadcast", 1, whole, summed.group_axes)
            else:
                yield Traffic("optimizer", "updated weights", "all_gather", 1, whole, summed.group_axes)
            if step.precision.loss_scale:
                yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, summed.group_axes)
