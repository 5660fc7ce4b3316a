"""Shards of torch's ``fully_shard`` in the host's memory, as its CPUOffloadPolicy keeps them.

That policy's copies are torch's own operators, which copy nothing on CPUs. So parameters here have a class of
their own, whose copies are operators that meters see, at the same places on the same streams. A shard goes to
the device in its own dtype, on the stream that copies in before an all-gather (``all_gather_inputs`` of
torch/distributed/fsdp/_fully_shard/_fsdp_param.py). A gradient goes to new pinned memory on the stream that
has reduce-scattered it (``foreach_reduce`` of _fsdp_collectives.py).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spbench.impls.backends.host_adam import HostAdam
from spbench.impls.kernels.host_copies import host_add_, host_empty_like, host_zeros, to_device_, to_host_
from spbench.impls.rings import wait_for_device

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


@torch.no_grad()
def move_to_host(module: nn.Module, device: str) -> None:
    """Move each shard of a sharded module to pinned memory of the host, with its values or, if it has none,
    zeros.

    Args:
        device: of the shards while they are used.
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
    padded = host_zeros(on_device, sharded.padded_sharded_param_size, before.dtype)
    if before.device.type != "meta":
        to_host_(padded.view(-1), before)
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
    """A parameter whose shard is on the host."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    class HostParam(FSDPParam):
        def reset_sharded_param(self) -> None:
            """The shard stays where it was put."""

        def init_dtype_attrs(self, mp_policy: Any) -> None:
            super().init_dtype_attrs(mp_policy)
            # None: torch asks for all_gather_inputs, and does not round shards together where they are
            self.gathered_dtype, self.param_dtype = self.param_dtype or self.orig_dtype, None

        @property
        def all_gather_inputs(self) -> list[Tensor]:
            shard = self._sharded_param_data
            x = torch.empty(shard.shape, dtype=shard.dtype, device=self.device)
            to_device_(x, shard)
            return [x.to(self.gathered_dtype)]

    return HostParam


class HostShards(HostAdam):
    """AdamW on shards that are on the host, whose gradients are new pinned memory in each step."""

    def begin(self) -> None:
        for shard in self.masters:
            shard.grad = None

    @torch.no_grad()
    def take(self, number: int, gradient: Tensor, *, last: bool) -> None:
        """Wait for a gradient, and add it on the host to the sum of the micro-batches before."""
        there = host_empty_like(gradient)
        to_host_(there, gradient)
        before = self.masters[number].grad
        if before is None:
            self.masters[number].grad = there
        else:
            wait_for_device(gradient)
            host_add_(before, there)

    def gradient(self, number: int) -> Tensor:
        gradient = self.masters[number].grad
        assert gradient is not None
        return gradient
