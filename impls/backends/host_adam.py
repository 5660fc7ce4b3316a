"""AdamW on the host: masters and moments in its memory, updated by its cores (ZeRO-Offload, Ren et al., arXiv
2101.06840, section 4).

Gradients cross to pinned memory of the host, as wide as the masters. Moments are pageable, as torch's and
DeepSpeed's optimizers allocate them on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.collectives import all_reduce
from spbench.impls.kernels.host_copies import (
    host_adamw_,
    host_unscale_,
    host_zeros,
    pageable_zeros,
    to_device_,
    to_host_,
)
from spbench.impls.rings import wait_for_device


class HostAdam(Optimizer):
    """AdamW on tensors of the host, whose gradients are there too when a step begins.

    Args:
        masters: the tensors to update.
        device: any tensor of the device that makes the gradients.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        precision: Precision,
        device: Tensor,
        *,
        with_moments: bool,
        overflow_groups: Sequence[dist.ProcessGroup | None] = (),
        lr: float,
    ):
        super().__init__(
            masters,
            replace(precision, master=False),
            with_moments=False,
            overflow_groups=overflow_groups,
            lr=lr,
            device=device.device,
        )
        self.device = device.new_empty(0)
        if precision.loss_scale:
            self._found_inf, self._scale = (host_zeros(device, [], torch.float32) for _ in range(2))
        if with_moments:
            self._make_moments()

    def _make_moments(self) -> None:
        for master in self.masters:
            if master not in self.adam.state:
                moments = {
                    name: pageable_zeros(self.device, master.shape, master.dtype)
                    for name in ("exp_avg", "exp_avg_sq")
                }
                self.adam.state[master] = {
                    "step": pageable_zeros(self.device, [], torch.float32),
                    **moments,
                }

    def take(self, number: int, gradient: Tensor, *, last: bool) -> None:
        """Copy a gradient to the host, on the current stream.

        Args:
            number: of the weight.
            gradient: of one micro-batch; or, of several, only the sum with the ``last``.
        """
        raise NotImplementedError

    def gradient(self, number: int) -> Tensor:
        """The host's copy of the gradient of weight ``number``."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters, and the weights that follow from them."""
        if not self.masters:
            return
        if self.precision.loss_scale:
            to_host_(self._scale, self.scale)
        self.wait()
        if self.precision.loss_scale:
            self._unscale()
        self._make_moments()
        for number, master in enumerate(self.masters):
            state, (group,) = self.adam.state[master], self.adam.param_groups
            assert master.grad is not None
            self.arrived(number)
            host_adamw_(
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
        host_unscale_(gradients, self._found_inf, self._scale)
        overflow = torch.empty_like(self.scale)
        to_device_(overflow, self._found_inf)
        for group in self.overflow_groups:
            all_reduce(overflow, group, ReduceOp.MAX)
        to_host_(self._found_inf, overflow)
        torch._amp_update_scale_(self.scale, self.since_growth, overflow, 2.0, 0.5, 1000)
        wait_for_device(self.device)
