"""PyTorch's first FullyShardedDataParallel around a whole model, as one unit (Zhao et al., arXiv 2304.11277).

FSDP1 succeeds fairscale's FSDP (:mod:`spbench.impls.backends.fsdp_flat`) and differs in three ways
(torch/distributed/fsdp/_runtime_utils.py and _flat_param.py of torch 2.3). The flat parameter is gathered on
a stream of its own and its gradient reduce-scattered on another, so neither reuses memory of the computing
stream. Parameters whose gradients no other rank shares, such as those split by tensor parallelism, are not
sharded (``ignored_modules``). A root unit is not freed between forward and backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from spbench.impls.backends.backend import Backend, HeldPart
from spbench.impls.backends.flat import FlatShard
from spbench.impls.backends.fsdp_flat import FlatFullySharded, take_parameters
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.options import Options
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class FullySharded1Options(Options):
    """Options of :class:`FullySharded1`.

    Attributes:
        shard_dtype: the dtype of shards, gradients and moments: "float32", with ``MixedPrecision`` for
            computing in half precision; "parameters": the dtype of the weights, for a model that was in half
            precision before FSDP wrapped it.
        implementation: as in :class:`OptimizerOptions`.
    """

    shard_dtype: Literal["float32", "parameters"] = "float32"
    implementation: Literal["fused", "foreach"] = "fused"


class FullySharded1(FlatFullySharded):
    """One flat unit for all parameters whose gradients are summed over the same group of ranks; the others
    are held whole, with gradients and moments of their dtype."""

    name = "fsdp1"
    options_type = FullySharded1Options
    options: FullySharded1Options

    def prepare(self) -> Optimizer:
        self.device = torch.empty(0, device=next((p.device for p in self.names), None))
        device = torch.get_device_module(self.device.device)
        self._gathers, self._scatters = device.Stream(), device.Stream()
        held = self.precision
        if self.options.shard_dtype == "parameters":
            held = replace(held, master=False)
        shared = [(group, parameters) for group, parameters in self.summed() if group is not None]
        self.units = [FlatShard({self.names[p]: p for p in found}, group, held) for group, found in shared]
        taken = {p: self.names[p] for _, found in shared for p in found}
        self.owners = take_parameters(self.module, taken)
        self.names = {p: name for p, name in self.names.items() if p not in taken}
        del shared, taken  # or the whole parameters would live on while moments are made
        self.module.register_forward_pre_hook(self._gather)
        held_here = [*(unit.weights for unit in self.units), *self.names]
        groups = [unit.group for unit in self.units]
        return self.make_optimizer(held_here, masters=False, shard_groups=groups)

    def zero(self) -> None:
        super().zero()
        for p in self.names:
            p.grad = None

    def held(self) -> dict[str, list[Tensor]]:
        return {**super().held(), "parameters": list(self.names)}

    def gradient_parts(self) -> dict[str, HeldPart]:
        return super().gradient_parts() | Backend.gradient_parts(self)

    def weight_parts(self) -> dict[str, HeldPart]:
        return super().weight_parts() | Backend.weight_parts(self)

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        yield from super().traffic(replace(step, summed=[each for each in step.summed if each.size > 1]))

    def gathered(self, unit: FlatShard) -> Tensor:
        with self._behind(self._gathers):
            return super().gathered(unit)

    def scattered(self, unit: FlatShard, gradient: Tensor) -> Tensor:
        with self._behind(self._scatters):
            return super().scattered(unit, gradient)

    @contextmanager
    def _behind(self, stream: Any) -> Iterator[None]:
        """A context in which work runs on ``stream``, after the computing stream's work so far; at its end
        the computing stream waits for this work."""
        device = torch.get_device_module(self.device.device)
        stream.wait_stream(device.current_stream())
        with device.stream(stream):
            yield
        device.current_stream().wait_stream(stream)
