"""Fully sharded data parallelism with the whole model as one flat unit, as in fairscale and metaseq (Zhao et
al., arXiv 2304.11277, section 3).

Each rank holds 1/N of the float32 weights and moments. Forward all-gathers a half-precision flat parameter
whose views are the weights. autograd makes a gradient for each view and then concatenates these gradients, so
6 bytes a parameter are alive when backward ends, before the flat gradient is reduce-scattered.

With ``optimizer: host``, as in fairscale's move_params_to_cpu, the shards, which are the masters, are on the
host too. Each shard goes to the device in float32 before its all-gather, and the summed gradient goes to a
pinned tensor that is kept from step to step.
"""

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from spbench.impls.backends.backend import Backend, HeldPart
from spbench.impls.backends.flat import FlatShard, padded
from spbench.impls.backends.host_adam import HostAdam
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.optimizer_options import OptimizerOptions
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.collectives import all_gather_flat, reduce_scatter_flat
from spbench.impls.kernels.host_copies import host_zeros, to_device_, to_host_
from spbench.impls.options import Options
from spbench.impls.traffic import Traffic


class FlatFullySharded(Backend):
    """One flat unit for all parameters whose gradients are summed over the same group."""

    name = "fsdp_flat"
    searched = False
    spans_layers = True  # in one buffer that forward and backward need
    shares_out = frozenset({"optimizer_state", "gradients", "parameters"})
    pipelined = False
    freezes = False
    options_type: ClassVar[type[Options]] = OptimizerOptions

    def prepare(self) -> Optimizer:
        self.units = [
            FlatShard({self.names[p]: p for p in parameters}, group, self.precision, on_host=self.on_host)
            for group, parameters in self.summed()
        ]
        self.device = torch.empty(0, device=next((p.device for p in self.names), None))
        self.owners = take_parameters(self.module, dict(self.names))
        self.names.clear()  # or the whole parameters would live on
        self.module.register_forward_pre_hook(self._gather)
        shards = [unit.weights for unit in self.units]  # the masters
        if self.on_host and shards:
            for shard in shards:
                shard.grad = host_zeros(self.device, shard.shape, shard.dtype)
            settings = self.optimizer_settings([unit.group for unit in self.units])
            return HostAdam(shards, self.precision, self.device, **settings)
        return self.make_optimizer(shards, masters=False, shard_groups=[unit.group for unit in self.units])

    def zero(self) -> None:
        for unit in self.units:
            unit.gradient = None

    def synchronize(self) -> None:
        for unit in self.units:  # reduce-scattered in backward
            if self.on_host:
                assert unit.weights.grad is not None
                assert unit.gradient is not None
                to_host_(unit.weights.grad, unit.gradient)
                unit.gradient = None
            else:
                unit.weights.grad = unit.gradient

    def step(self) -> None:
        super().step()
        if not self.on_host:
            for unit in self.units:
                unit.weights.grad = None

    def held(self) -> dict[str, list[Tensor]]:
        weights = [unit.weights for unit in self.units]
        return {**super().held(), "parameters": [], "optimizer_state": [*weights, *self.optimizer.tensors()]}

    def held_gradients(self) -> list[Tensor]:
        return []

    def gradient_parts(self) -> dict[str, HeldPart]:
        held = ((unit, unit.weights.grad if self.on_host else unit.gradient) for unit in self.units)
        parts = (unit.parts(gradient) for unit, gradient in held if gradient is not None)
        return {name: part for of_unit in parts for name, part in of_unit.items()}

    def weight_parts(self) -> dict[str, HeldPart]:
        return {name: part for unit in self.units for name, part in unit.parts(unit.weights).items()}

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        for summed in step.summed:
            payload = padded(summed.elements, summed.size) * step.element_bytes
            count = step.micro_batches
            yield Traffic("forward", "flat parameter", "all_gather", count, payload, summed.group_axes)
            yield Traffic("backward", "flat gradient", "reduce_scatter", count, payload, summed.group_axes)
            if step.precision.loss_scale:
                yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, summed.group_axes)

    def _gather(self, module: nn.Module, inputs: object) -> None:
        """Before a forward: gather each unit's flat parameter and set the weights to its views."""
        for unit in self.units:
            flat = self.gathered(unit)
            flat.requires_grad_().register_post_accumulate_grad_hook(partial(self._scatter, unit))
            for name, view in unit.views(flat).items():
                for owner, attribute in self.owners[name]:
                    setattr(owner, attribute, view)

    def gathered(self, unit: FlatShard) -> Tensor:
        """The whole flat parameter of a unit."""
        shard = self._on_device(unit.weights).to(self.precision.parameters)
        return shard.clone() if unit.group is None else all_gather_flat(shard, unit.group)

    def scattered(self, unit: FlatShard, gradient: Tensor) -> Tensor:
        """This rank's shard of a unit's flat gradient, summed over the unit's group."""
        if unit.group is not None:
            gradient = reduce_scatter_flat(gradient, unit.group)
        return gradient.to(unit.weights.dtype)

    def _on_device(self, shard: Tensor) -> Tensor:
        """A shard on the device: itself, or a copy if the shard is on the host."""
        if not self.on_host:
            return shard
        x = torch.empty(shard.shape, dtype=shard.dtype, device=self.device.device)
        to_device_(x, shard)
        return x

    def _scatter(self, unit: FlatShard, flat: Tensor) -> None:
        """Hook of a unit's flat gradient: free the weights, sum the gradient, and keep this rank's shard."""
        gradient, flat.grad = flat.grad, None
        assert gradient is not None
        for name in unit.names:
            for owner, attribute in self.owners[name]:
                delattr(owner, attribute)
        flat.data = flat.new_empty(0)  # free the memory even if a part of the graph still lives
        gradient = self.scattered(unit, gradient)
        unit.gradient = gradient if unit.gradient is None else unit.gradient.add_(gradient)


def take_parameters(
    module: nn.Module, names: dict[nn.Parameter, str]
) -> dict[str, list[tuple[nn.Module, str]]]:
    """Remove parameters from a module; returns the (module, attribute) pairs where each was, by its name."""
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for attribute, p in list(owner._parameters.items()):
            if p in names:
                owners.setdefault(names[p], []).append((owner, attribute))
                delattr(owner, attribute)
    return owners
