"""A module without a wrapper around it: gradients where backward makes them, and torch's optimizer.

Hugging Face's Trainer and others train like this on one card. Replicas sum each gradient after backward, as a
loop over parameters does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from spbench.impls.backends.backend import Backend
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.optimizer_options import OptimizerOptions
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.collectives import all_reduce
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class UnwrappedOptions(OptimizerOptions):
    """Options of :class:`Unwrapped`.

    Attributes:
        state_dtype: the dtype of the optimizer's weights and moments: "fp32", with masters of half-precision
            weights; "weights": the dtype of the weights.
    """

    state_dtype: Literal["fp32", "weights"] = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.optimizer, self.state_dtype) == ("host", "weights"):
            raise ValueError("state_dtype: weights needs the optimizer on the device; leave it out")


class Unwrapped(Backend):
    """No buffer of gradients; they are freed after the update."""

    name = "unwrapped"
    searched = False
    shares_out = frozenset()
    options_type = UnwrappedOptions
    options: UnwrappedOptions

    def prepare(self) -> Optimizer:
        self.groups = list(self.summed())
        return self.make_optimizer(list(self.names), masters=self.options.state_dtype == "fp32")

    def zero(self) -> None:
        for p in self.names:
            p.grad = None

    def synchronize(self) -> None:
        for group, parameters in self.groups:
            for p in parameters if group is not None else ():
                assert p.grad is not None
                all_reduce(p.grad, group)
        self.around.add_tied(self.module)

    def step(self) -> None:
        super().step()
        self.zero()

    def held_gradients(self) -> list[Tensor]:
        return []

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        for summed in step.summed:
            payload = summed.elements * step.element_bytes
            yield Traffic("gradient_sync", "gradients", "all_reduce", 1, payload, summed.group_axes)
