"""AdamW in mixed precision, as in Megatron-LM's FP16 optimizer of 2021: half-precision weights and gradients,
float32 master weights and moments, dynamic loss scaling. The optimizer reads no value on the host, so the
same step runs on fake tensors.

:class:`NarrowMoments` has moments in half precision and float32 main weights, as TransformerEngine's
FusedAdam (pytorch/optimizers/fused_adam.py; --use-precision-aware-optimizer of Megatron-Core).

Its kernel computes in float32, and rounds the moments when it writes them (TransformerEngine since commit
459e7cf; before, the step made float32 copies of all moments).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from spbench.impls.collectives import all_reduce
from spbench.impls.kernels.operator import operator
from spbench.impls.layout import Unsupported


@dataclass(frozen=True)
class Precision:
    """The dtypes of weights and optimizer, and the loss scale.

    Attributes:
        parameters: the dtype of weights, activations and gradients.
        master: whether the optimizer keeps float32 copies of the weights.
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


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which new floating-point tensors have that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Optimizer:
    """AdamW, on float32 master weights and with loss scaling if the precision has these.

    Args:
        with_moments: allocate the moments now instead of in the first step.
        master_gradients: the masters' float32 gradients: "made" by a step and freed, "kept" in one place, or
            "stale": made by a step while those of the step before are still alive, as in Megatron-LM of 2021.
        overflow_groups: the groups of ranks that hold other parts of the weights, all of which skip the step
            after an overflow on one rank (None: only this rank).
        device: the device of the loss; None: the device of the weights.
        foreach: use torch's own default update, see :func:`update_all`.

    Raises:
        Unsupported: ``foreach`` with a loss scale.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        precision: Precision,
        *,
        with_moments: bool,
        master_gradients: str = "made",
        overflow_groups: Sequence[dist.ProcessGroup | None] = (),
        lr: float = 1e-4,
        device: torch.device | None = None,
        foreach: bool = False,
    ):
        if foreach and precision.loss_scale:
            raise Unsupported(
                "implementation: foreach heeds no overflow of a loss scale",
                "use implementation: fused, or bf16",
            )
        #: the number of updates of each master so far
        self.foreach, self.updates, self.updates_of = foreach, 0, Counter[Tensor]()
        self.parameters = parameters
        self.precision = precision
        self.master_gradients = master_gradients
        #: called with the masters' gradients before an update, when they are no longer scaled
        self.before_update: Callable[[list[Tensor]], None] | None = None
        self.overflow_groups = overflow_groups
        self.masters = (
            [p.detach().float().requires_grad_() for p in self.parameters]
            if precision.master
            else self.parameters
        )
        # a parameter group, because torch refuses an empty list of weights
        self.adam = torch.optim.AdamW([{"params": self.masters}], lr=lr, weight_decay=0.01, fused=True)
        if precision.loss_scale:
            device = device or self.masters[0].device
            self.scale = torch.full((), precision.loss_scale, dtype=torch.float32, device=device)
            self.since_growth = torch.zeros((), dtype=torch.int32, device=device)
        if master_gradients != "made" and precision.master:
            for p in self.masters:
                p.grad = torch.zeros_like(p)
        if with_moments:
            self.make_states()

    def make_states(self) -> None:
        """Allocate the states of the masters that have none."""
        for p in self.masters:
            if not self.adam.state[p]:
                self.adam.state[p] = self.new_state(p)

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """The moments of a master before its first update, and what else torch's optimizer keeps."""
        # torch's own default has counts of steps on the host
        step = {} if self.foreach else {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
        return {**step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the steps from now on."""
        for group in self.adam.param_groups:
            group["lr"] = lr

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, from which backward starts."""
        return loss * self.scale if self.precision.loss_scale else loss

    def begin(self) -> None:
        """Called before a step, when there are no gradients yet."""

    def step(self) -> None:
        """Update the weights from the gradients; with loss scaling, only if none of them overflowed."""
        if self.precision.master:
            for master, p in zip(self.masters, self.parameters, strict=True):
                assert p.grad is not None
                if self.master_gradients == "kept":
                    assert master.grad is not None
                    master.grad.copy_(p.grad)
                else:
                    master.grad = p.grad.float()
        if self.precision.loss_scale:
            self._unscale()
        if self.before_update is not None:
            self.before_update(self.gradients())
        self.update()
        if self.precision.master:
            for master, p in zip(self.masters, self.parameters, strict=True):
                p.detach().copy_(master.detach())
                if self.master_gradients == "made":
                    master.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients of the masters."""
        return [p.grad for p in self.masters if p.grad is not None]

    def update(self) -> None:
        """Update the masters from their gradients."""
        if not self.foreach:
            self.adam.step()
            return
        masters = [p for p in self.masters if p.grad is not None]
        for p in masters if not self.updates_of[masters[0]] else ():
            for name in ("exp_avg", "exp_avg_sq"):
                self.adam.state[p].setdefault(name, torch.zeros_like(p))
        self.updates_of.update(masters)
        states, count = [self.adam.state[p] for p in masters], self.updates_of[masters[0]]
        update_all(masters, self.gradients(), states, count, self.adam.param_groups[0])

    def tensors(self) -> list[Tensor]:
        """The tensors held between steps."""
        state = [value for held in self.adam.state.values() for value in held.values()]
        return [*self.masters, *state, *self.gradients()] if self.precision.master else state

    def _unscale(self) -> None:
        gradients = self.gradients()
        overflow = torch.zeros((), dtype=torch.float32, device=self.scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self.scale.reciprocal())
        for group in self.overflow_groups:
            all_reduce(overflow, group, ReduceOp.MAX)
        self.adam.found_inf = overflow  # type: ignore[attr-defined]  # fused Adam skips the step on it
        torch._amp_update_scale_(self.scale, self.since_growth, overflow, 2.0, 0.5, 1000)


@torch.no_grad()
def update_all(
    weights: Sequence[Tensor],
    gradients: list[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    count: int,
    settings: Mapping[str, Any],
) -> None:
    """Update weights as torch's AdamW does by default on GPUs (_multi_tensor_adam of torch/optim/adam.py):
    each operation on all weights at once.

    Args:
        states: the moments ``exp_avg`` and ``exp_avg_sq`` of each weight.
        count: the number of this update, from 1 on.
        settings: lr, betas, eps and weight_decay.
    """
    first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    (beta1, beta2), lr, held = settings["betas"], settings["lr"], list(weights)
    torch._foreach_mul_(held, 1 - lr * settings["weight_decay"])
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    roots = torch._foreach_sqrt(second)
    torch._foreach_div_(roots, (1 - beta2**count) ** 0.5)
    torch._foreach_add_(roots, settings["eps"])
    torch._foreach_addcdiv_(held, first, roots, -lr / (1 - beta1**count))


_MOMENTS = ("exp_avg", "exp_avg_sq")


@operator("spbench::_fused_adamw_narrow_", mutates_args={"weights", "means", "squares"}, fake=lambda *_: None)
def _update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    count: int,
    settings: Sequence[float],
) -> None:
    """Update each weight and its moments; ``count`` is the number of this update, from 1 on, and ``settings``
    are learning rate, the betas, epsilon and weight decay."""
    lr, beta1, beta2, eps, decay = settings
    for weight, gradient, mean, square in zip(weights, gradients, means, squares, strict=True):
        m = mean.to(weight.dtype).lerp_(gradient, 1 - beta1)
        v = square.to(weight.dtype).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (v / (1 - beta2**count)).sqrt_().add_(eps)
        weight.mul_(1 - lr * decay).addcdiv_(m, root, value=-lr / (1 - beta1**count))
        mean.copy_(m)
        square.copy_(v)


class NarrowMoments(Optimizer):
    """AdamW whose moments have the dtype ``dtype``, whatever the dtype of the weights."""

    def __init__(
        self, parameters: Sequence[Tensor], precision: Precision, dtype: torch.dtype, **settings: Any
    ):
        self.dtype = dtype
        super().__init__(parameters, precision, **settings)

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p, dtype=self.dtype) for name in _MOMENTS}

    @torch.no_grad()
    def update(self) -> None:
        self.make_states()
        self.updates += 1
        group = self.adam.param_groups[0]
        means, squares = ([self.adam.state[p][name] for p in self.masters] for name in _MOMENTS)
        settings = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        _update(list(self.masters), self.gradients(), means, squares, self.updates, settings)
