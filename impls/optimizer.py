"""AdamW in mixed precision, as Megatron-LM's FP16 optimizer of 2021: half-precision weights and gradients,
float32 master weights and moments, dynamic loss scaling. No value is read on the host, so the same step
runs on fake tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from impls.communication import all_reduce
from impls.composition import Composition
from impls.precision import Precision
from impls.strategy import Strategy, shard_of


class Optimizer:
    """AdamW, on float32 master weights and with loss scaling where the precision asks for them.

    Args:
        with_moments: make the moments now, as after a first step, not in the first step.
        stale_gradients: keep the masters' float32 gradients from step to step, as Megatron-LM of 2021 did.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        precision: Precision,
        *,
        with_moments: bool,
        stale_gradients: bool = False,
        around: Composition | None = None,
        lr: float = 1e-4,
    ):
        self.parameters = list(module.parameters())
        self.precision = precision
        self.masters = (
            [p.detach().float().requires_grad_() for p in self.parameters]
            if precision.master
            else self.parameters
        )
        self.adam = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.01, fused=True)
        # an overflow on one rank must skip the step on all ranks that hold other parts of the weights
        spread = any(shard_of(p) for p in self.parameters)
        pp_group = around.pp_group if around else None
        self.overflow_groups = [strategy.group if spread else None, pp_group]
        if precision.loss_scale:
            self.scale = torch.full((), precision.loss_scale, dtype=torch.float32)
            self.since_growth = torch.zeros((), dtype=torch.int32)
        self.stale_gradients = stale_gradients
        if stale_gradients and precision.master:
            for p in self.masters:
                p.grad = torch.zeros_like(p)
        if with_moments:
            for p in self.masters:
                self.adam.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    def set_learning_rate(self, lr: float) -> None:
        """Of the steps from now on."""
        for group in self.adam.param_groups:
            group["lr"] = lr

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.scale if self.precision.loss_scale else loss

    def step(self) -> None:
        """Update the weights from the gradients; with loss scaling, not if one of them overflowed."""
        if self.precision.master:
            for master, p in zip(self.masters, self.parameters, strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
        if self.precision.loss_scale:
            self._unscale()
        self.adam.step()
        if self.precision.master:
            for master, p in zip(self.masters, self.parameters, strict=True):
                p.detach().copy_(master.detach())
                if not self.stale_gradients:
                    master.grad = None

    def tensors(self) -> list[Tensor]:
        """What is held between steps."""
        state = [value for held in self.adam.state.values() for value in held.values()]
        gradients = [p.grad for p in self.masters if p.grad is not None]
        return [*self.masters, *state, *gradients] if self.precision.master else state

    def _unscale(self) -> None:
        gradients = [p.grad for p in self.masters if p.grad is not None]
        overflow = torch.zeros((), dtype=torch.float32, device=self.scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self.scale.reciprocal())
        for group in self.overflow_groups:
            all_reduce(overflow, group, ReduceOp.MAX)
        self.adam.found_inf = overflow  # type: ignore[attr-defined]  # fused Adam skips the step on it
        torch._amp_update_scale_(self.scale, self.since_growth, overflow, 2.0, 0.5, 1000)
