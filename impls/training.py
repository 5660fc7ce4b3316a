"""One training step, as any engine runs it: forward, backward, gradient sync, optimizer.

Mixed precision is that of Megatron-LM's FP16 optimizer (2021): half-precision weights and gradients,
float32 master weights and Adam moments, dynamic loss scaling. No value is read on the host, so the same
step runs on fake tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from impls.communication import all_reduce
from impls.strategy import Site, Strategy, shard_of

PHASES = ("forward", "backward", "gradient_sync", "optimizer")


@dataclass(frozen=True)
class Precision:
    """How numbers are held.

    Attributes:
        parameters: dtype of weights, activations and gradients.
        master: keep float32 copies of the weights for the optimizer.
        loss_scale: initial dynamic loss scale, or None.
    """

    parameters: torch.dtype
    master: bool = False
    loss_scale: float | None = None


PRECISIONS = {
    "fp16": Precision(torch.float16, master=True, loss_scale=2.0**16),
    "bf16": Precision(torch.bfloat16, master=True),
    "fp32": Precision(torch.float32),
    "fp64": Precision(torch.float64),
}


def training_sites(precision: Precision) -> list[Site]:
    """What the step itself asks of a strategy, beside the model's sites."""
    return [Site("overflow_flag", 1)] if precision.loss_scale else []


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new floating tensors of that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def initialize(module: nn.Module, seed: int, *, deviation: float = 0.02, everything: bool = False) -> None:
    """Give the module the weights that a single device has for this seed, each rank its own part.

    Matrices are normal with that standard deviation, drawn whole in float64 from a generator seeded by
    the parameter's name, then cut. ``everything`` adds such noise to vectors too (biases, norms).
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2 and not everything:
            continue
        shard = shard_of(parameter)
        shape = shard.full_shape(parameter.shape) if shard else list(parameter.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full = torch.randn(shape, generator=generator, dtype=torch.float64) * deviation
        values = shard.of(full) if shard else full
        with torch.no_grad():
            if parameter.ndim < 2:
                parameter.copy_(parameter.double() + values)  # rounded once, whatever the dtype
            else:
                parameter.copy_(values)


class ContiguousGradients:
    """Gradients as views of contiguous buffers, one for those to be summed over the group and one for
    the others, so that a sync is a single all-reduce and gradients are never freed."""

    def __init__(self, module: nn.Module, strategy: Strategy):
        self.group = strategy.group
        self.buffers: list[tuple[bool, Tensor]] = []
        for partial in (True, False):
            parameters = [p for p in module.parameters() if _is_partial(p, strategy) is partial]
            if parameters:
                buffer = parameters[0].new_zeros(sum(p.numel() for p in parameters))
                for p, piece in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
                    p.grad = piece.view_as(p)
                self.buffers.append((partial, buffer))

    def tensors(self) -> list[Tensor]:
        """What is held between steps."""
        return [buffer for _, buffer in self.buffers]

    def zero(self) -> None:
        """Before a step."""
        for _, buffer in self.buffers:
            buffer.zero_()

    def synchronize(self) -> None:
        """Sum over the group the gradients of which each rank holds a part of the sum."""
        for partial, buffer in self.buffers:
            if partial:
                all_reduce(buffer, self.group)


class StaleGradients:
    """Gradients as Megatron-LM's local DDP of 2021 held them: a tensor for each parameter, made anew by
    each backward, while those of the step before stay alive (as ``main_grad``) until the next sync."""

    def __init__(self, module: nn.Module, strategy: Strategy):
        self.group = strategy.group
        self.parameters = list(module.parameters())
        self.partial = [p for p in self.parameters if _is_partial(p, strategy)]
        self.stale = [torch.zeros_like(p) for p in self.parameters]  # as after a step

    def tensors(self) -> list[Tensor]:
        return self.stale

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None

    def synchronize(self) -> None:
        self.stale = [p.grad for p in self.parameters if p.grad is not None]
        if self.partial:
            gradients = [p.grad for p in self.partial if p.grad is not None]
            flat = all_reduce(torch.cat([g.flatten() for g in gradients]), self.group)
            for g, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                g.copy_(piece.view_as(g))


def _is_partial(parameter: nn.Parameter, strategy: Strategy) -> bool:
    shard = shard_of(parameter)
    mine_alone = shard is not None and shard.axis == strategy.axis
    return strategy.gradient_is_partial(parameter) and not mine_alone


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
        self.overflow_group = strategy.group if any(shard_of(p) for p in self.parameters) else None
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
        all_reduce(overflow, self.overflow_group, ReduceOp.MAX)
        self.adam.found_inf = overflow  # type: ignore[attr-defined]  # fused Adam skips the step on it
        torch._amp_update_scale_(self.scale, self.since_growth, overflow, 2.0, 0.5, 1000)


class Training:
    """A module with all that a training step needs.

    Args:
        module: maps a dict of this rank's inputs to a dict with ``loss``.
        strategy: the strategy that the module was built with.
        precision: one of PRECISIONS.
        moments: "kept": Adam's moments exist before the step, as in every step but the first that updates;
            "later": they do not yet, and the step's update makes them.
        gradients: "contiguous" or "stale"; see :class:`ContiguousGradients`, :class:`StaleGradients`.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        precision: Precision,
        *,
        moments: str = "kept",
        gradients: str = "contiguous",
    ):
        self.module, self.strategy = module, strategy
        stale = gradients == "stale"
        self.gradients = (StaleGradients if stale else ContiguousGradients)(module, strategy)
        self.optimizer = Optimizer(
            module, strategy, precision, with_moments=moments == "kept", stale_gradients=stale
        )
        self.steps = 0

    def step(
        self,
        inputs: Mapping[str, Tensor],
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> Tensor:
        """One step on this rank's inputs; ``phase(name)`` is entered around each of PHASES.

        Returns this rank's share of the loss, detached.
        """
        self.strategy.random.begin_step(self.steps)
        self.steps += 1
        self.gradients.zero()
        with phase("forward"):
            loss = self.module(inputs)["loss"]
        with phase("backward"):
            self.optimizer.scaled(loss).backward()
        with phase("gradient_sync"):
            self.gradients.synchronize()
        with phase("optimizer"):
            self.optimizer.step()
        return loss.detach()
