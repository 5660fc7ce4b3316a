"""AdamW on the host: masters and moments in the host's memory, updated by its cores (ZeRO-Offload, Ren et
al., arXiv 2101.06840, section 4).

Gradients cross to pinned memory of the host, as wide as the masters. Moments are in pageable memory, because
torch's and DeepSpeed's optimizers allocate them so on the CPU.

:class:`HostShards` keeps shards of torch's ``fully_shard`` on the host, as its CPUOffloadPolicy does.

That policy's copies are torch's own operators, which copy nothing on CPUs. So parameters here have a class of
their own, whose copies are operators that meters see, at the same places on the same streams. A shard goes to
the device in its own dtype, on the stream that copies in before an all-gather (``all_gather_inputs`` of
torch/distributed/fsdp/_fully_shard/_fsdp_param.py). A gradient goes to new pinned memory on the stream that
has reduce-scattered it (``foreach_reduce`` of _fsdp_collectives.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.collectives import all_reduce
from spbench.impls.kernels import host_copies
from spbench.impls.rings import wait_for_device

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class HostAdam(Optimizer):
    """AdamW on tensors of the host, whose gradients are on the host too when a step begins.

    Args:
        masters: the tensors to update.
        device: any tensor of the device that makes the gradients.
    """

    def __init__(self, masters: Sequence[Tensor], precision: Precision, device: Tensor, **settings: Any):
        self.device = device.new_empty(0)
        super().__init__(masters, replace(precision, master=False), device=device.device, **settings)
        if precision.loss_scale:
            self._found_inf, self._scale = (
                host_copies.host_zeros(device, [], torch.float32) for _ in range(2)
            )

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        names, zeros = ("exp_avg", "exp_avg_sq"), host_copies.pageable_zeros
        moments = {name: zeros(self.device, p.shape, p.dtype) for name in names}
        return {"step": zeros(self.device, [], torch.float32), **moments}

    def take(self, number: int, gradient: Tensor, *, last: bool) -> None:
        """Copy the gradient of a weight to the host, on the current stream.

        Args:
            number: the index of the weight.
            gradient: of one micro-batch; or the sum over several, passed with the ``last`` of them.
        """
        raise NotImplementedError

    def gradient(self, number: int) -> Tensor:
        """The host's copy of the gradient of weight ``number``."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters, and copy them to the weights that they are the masters of."""
        if not self.masters:
            return
        if self.precision.loss_scale:
            host_copies.to_host_(self._scale, self.scale)
        self.wait()
        if self.precision.loss_scale:
            self._unscale()
        self.make_states()
        for number, master in enumerate(self.masters):
            state, (group,) = self.adam.state[master], self.adam.param_groups
            assert master.grad is not None
            self.arrived(number)
            host_copies.host_adamw_(
                [master],
                [master.grad],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [state["step"]],
                group["lr"],
                group["weight_decay"],
                self._found_inf if self.precision.loss_scale else None,
            )
            self.updated(number)

    def wait(self) -> None:
        """Called before the first update: wait for the copies to the host."""
        wait_for_device(self.device)

    def arrived(self, number: int) -> None:
        """Called before the update of master ``number``."""

    def updated(self, number: int) -> None:
        """Called after the update of master ``number``."""

    def tensors(self) -> list[Tensor]:
        gradients = [master.grad for master in self.masters if master.grad is not None]
        return [*self.masters, *super().tensors(), *gradients]

    def _unscale(self) -> None:
        gradients = [master.grad for master in self.masters if master.grad is not None]
        host_copies.host_unscale_(gradients, self._found_inf, self._scale)
        overflow = torch.empty_like(self.scale)
        host_copies.to_device_(overflow, self._found_inf)
        for group in self.overflow_groups:
            all_reduce(overflow, group, ReduceOp.MAX)
        host_copies.to_host_(self._found_inf, overflow)
        torch._amp_update_scale_(self.scale, self.since_growth, overflow, 2.0, 0.5, 1000)
        wait_for_device(self.device)


@torch.no_grad()
def move_to_host(module: nn.Module, device: str) -> None:
    """Move each shard of a sharded module to pinned memory of the host, with its values; shards on the meta
    device become zeros.

    Args:
        device: the device on which the shards are used.
    """
    from torch.distributed.fsdp import FSDPModule

    on_device = torch.empty(0, device=device)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for sharded in group.fsdp_params:
                    _move(sharded, on_device)


def _move(sharded: FSDPParam, on_device: Tensor) -> None:
    before = sharded._sharded_param_data
    padded = host_copies.host_zeros(on_device, sharded.padded_sharded_param_size, before.dtype)
    if before.device.type != "meta":
        host_copies.to_host_(padded.view(-1), before)
    sharded.__class__ = _host_param()
    sharded._sharded_param_data = padded.view(-1)
    dim = sharded.fsdp_placement.dim
    local = padded.narrow(dim, 0, sharded.sharded_size[dim])
    sharded.sharded_param = nn.Parameter(
        sharded.to_sharded_dtensor(local), requires_grad=sharded.sharded_param.requires_grad
    )
    sharded._setattr_on_modules(sharded.sharded_param)


@cache
def _host_param() -> Any:
    """The class of ``fully_shard``'s parameters whose shards are on the host."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    class HostParam(FSDPParam):
        def reset_sharded_param(self) -> None:
            """Leave the shard in the memory to which it was moved."""

        def init_dtype_attrs(self, mp_policy: Any) -> None:
            super().init_dtype_attrs(mp_policy)
            # None: torch then asks for all_gather_inputs instead of rounding all shards on the host
            self.gathered_dtype, self.param_dtype = self.param_dtype or self.orig_dtype, None

        @property
        def all_gather_inputs(self) -> list[Tensor]:
            shard = self._sharded_param_data
            x = torch.empty(shard.shape, dtype=shard.dtype, device=self.device)
            host_copies.to_device_(x, shard)
            return [x.to(self.gathered_dtype)]

    return HostParam


class HostShards(HostAdam):
    """AdamW on shards on the host, with new pinned memory for their gradients in each step."""

    def begin(self) -> None:
        for shard in self.masters:
            shard.grad = None

    @torch.no_grad()
    def take(self, number: int, gradient: Tensor, *, last: bool) -> None:
        """Copy a gradient to the host, and add it there to the sum of the earlier micro-batches."""
        there = host_copies.host_empty_like(gradient)
        host_copies.to_host_(there, gradient)
        before = self.masters[number].grad
        if before is None:
            self.masters[number].grad = there
        else:
            wait_for_device(gradient)
            host_copies.host_add_(before, there)

    def gradient(self, number: int) -> Tensor:
        gradient = self.masters[number].grad
        assert gradient is not None
        return gradient
