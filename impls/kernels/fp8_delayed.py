"""Delayed scaling: casts by scales that earlier passes have set, as TransformerEngine's DelayedScaling.

A cast reads a matrix once. It multiplies with a scale that is there already and notes the largest magnitude
on the way, where current scaling needs a pass before it. At the end of a forward pass one all-reduce takes
the largest of each matrix over the ranks of a pipeline stage, a kernel sets the scales for the next pass, and
the history of magnitudes moves on by one; the same at the end of a backward pass, for gradients
(reduce_and_update_fp8_tensors of transformer_engine/pytorch/quantization.py, 2.x). A matmul has three places
in the list of forward (input, weight, output) and two in that of backward, whether they are used or not.

All scales are 1 before the first pass. Where a pass runs again for recomputation, it casts by the scales that
there are then; TransformerEngine keeps those of the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce
from spbench.impls.kernels.operator import operator

#: places of a matmul's matrices in the lists of forward (True) and backward, and how many it has there
_PLACES = {"input": (True, 0), "weight": (True, 1), "gradient": (False, 0)}
PLACES_OF_A_MATMUL = {True: 3, False: 2}


def _by_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    exact = x if x.dtype == torch.float64 else x.float()
    return (exact / scale).clamp(-limit, limit).to(dtype).contiguous()


def _note(x: Tensor, largest: Tensor) -> None:
    largest.copy_(torch.maximum(largest, x.abs().amax().to(largest.dtype)))


@operator("spbench::fp8_cast_delayed_", mutates_args={"largest"})
def fp8_cast_delayed_(
    x: Tensor, scale: Tensor, largest: Tensor, dtype: torch.dtype, transposed: bool
) -> tuple[Tensor, Tensor]:
    """x [r, c], or x^T, in eight bits by a scale [], and a copy of that [1, 1]; ``largest`` [] becomes the
    largest magnitude of x if it is less."""
    _note(x, largest)
    return _by_scale(x.mT if transposed else x, scale, dtype), scale.view(1, 1).clone()


@fp8_cast_delayed_.register_fake
def _(
    x: Tensor, scale: Tensor, largest: Tensor, dtype: torch.dtype, transposed: bool
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[1], x.shape[0]) if transposed else x.shape
    return x.new_empty(shape, dtype=dtype), scale.new_empty(1, 1)


@operator("spbench::fp8_cast_both_delayed_", mutates_args={"largest"})
def fp8_cast_both_delayed_(
    x: Tensor, scale: Tensor, largest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x and x^T as :func:`fp8_cast_delayed_`, by one kernel, and their scale [1, 1]."""
    _note(x, largest)
    data, transposed = (_by_scale(each, scale, dtype) for each in (x, x.mT))
    return data, transposed, scale.view(1, 1).clone()


@fp8_cast_both_delayed_.register_fake
def _(x: Tensor, scale: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    r, c = x.shape
    data, transposed = x.new_empty(r, c, dtype=dtype), x.new_empty(c, r, dtype=dtype)
    return data, transposed, scale.new_empty(1, 1)


@operator("spbench::fp8_update_scales_", mutates_args={"history", "scales"})
def fp8_update_scales_(history: Tensor, scales: Tensor, largest_number: float) -> None:
    """Set scales [n] so that the largest magnitudes of a history [h, n] become the format's largest number,
    and make room for the next in its first row. A matrix that has only had zeros keeps its scale."""
    of_all = history.amax(0)
    scales.copy_(torch.where(of_all > 0, of_all / largest_number, scales))
    history.copy_(history.roll(-1, 0))
    history[0].zero_()


class DelayedScaling(nn.Module):
    """The scales of all matmuls of some layers, and the magnitudes that the next ones are made of.

    Args:
        layers: whose weights are multiplied with in eight bits, if :func:`is_multiplied` says so.
        history: passes of which the largest magnitude counts.
        numbers: the largest numbers of the formats in forward and in backward.
        group: of the ranks over which a magnitude is the largest; None: this one alone.
    """

    def __init__(
        self,
        layers: nn.Module,
        history: int,
        numbers: tuple[float, float],
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.group, self.numbers = group, {True: numbers[0], False: numbers[1]}
        places = [*_weights_of(layers)]
        self.matmuls = len(places)
        for forward, name in ((True, "forward"), (False, "backward")):
            n = PLACES_OF_A_MATMUL[forward] * len(places)
            history_of = torch.zeros(history, n, dtype=torch.float32)
            self.register_buffer(f"{name}_history", history_of, persistent=False)
            self.register_buffer(f"{name}_scales", torch.ones(n, dtype=torch.float32), persistent=False)
        for number, (module, name) in enumerate(places):
            slots = {role: Slot(self, number, *place) for role, place in _PLACES.items()}
            module.__dict__.setdefault("spbench_fp8_slots", {})[name] = slots

    def of(self, *, forward: bool) -> tuple[Tensor, Tensor]:
        """The history [h, n] and the scales [n] of a direction."""
        name = "forward" if forward else "backward"
        return getattr(self, f"{name}_history"), getattr(self, f"{name}_scales")

    def update(self, *, forward: bool) -> None:
        """Set the scales of the next pass."""
        history, scales = self.of(forward=forward)
        if self.group is not None:
            largest = history[0].clone()  # as the magnitudes of all modules are joined
            all_reduce(largest, self.group, dist.ReduceOp.MAX)
            history[0].copy_(largest)
        fp8_update_scales_(history, scales, self.numbers[forward])

    def entering(self, x: Tensor) -> Tensor:
        """x, which the layers begin with; when its gradient is there, backward has ended."""
        result: Tensor = _Entering.apply(x, lambda: self.update(forward=False))
        return result


@dataclass(frozen=True)
class Slot:
    """The place of one matrix in the lists of a :class:`DelayedScaling`."""

    scaling: DelayedScaling
    matmul: int
    forward: bool
    place: int

    def _in(self, values: Tensor) -> Tensor:
        return values[PLACES_OF_A_MATMUL[self.forward] * self.matmul + self.place]

    @property
    def scale(self) -> Tensor:
        """The factor that a value counts times, []."""
        return self._in(self.scaling.of(forward=self.forward)[1])

    @property
    def largest(self) -> Tensor:
        """The largest magnitude of this pass, []."""
        return self._in(self.scaling.of(forward=self.forward)[0][0])


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ended: Callable[[], None]) -> Tensor:
        ctx.ended = ended
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.ended()
        return gradient, None


def is_multiplied(name: str, parameter: Tensor) -> bool:
    """Whether a parameter of that name in its module is a matmul's; the bias of parts that are projected
    together has two dims too."""
    return parameter.ndim > 1 and name != "bias"


def _weights_of(layers: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in layers.modules():
        for name, weight in module._parameters.items():
            if weight is not None and is_multiplied(name, weight):
                yield module, name
