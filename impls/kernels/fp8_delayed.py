"""Delayed scaling: casts use scales that earlier passes have set, as TransformerEngine's DelayedScaling.

A cast reads a matrix once: it uses the existing scale and records the largest magnitude at the same time,
where current scaling must first read the matrix for its magnitude. At the end of a forward pass, an
all-reduce takes each matrix's largest magnitude over the ranks of a pipeline stage, a kernel sets the scales
of the next pass, and the history of magnitudes moves on by one. The end of a backward pass does the same for
gradients (reduce_and_update_fp8_tensors of transformer_engine/pytorch/quantization.py, 2.x). A projection has
three places in the list of forward (input, weight, output) and two in the list of backward, used or not.

All scales are 1 before the first pass. When a pass runs again for recomputation, it casts by the scales of
that moment; TransformerEngine keeps the scales of the first run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce
from spbench.impls.kernels.operator import differentiable, operator

#: place of each matrix of a projection in the list of forward (True) or backward, and places in each list
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
    """Returns x [r, c], or x^T, in eight bits by a scale [], and a copy of the scale [1, 1]; raises
    ``largest`` [] to the largest magnitude of x."""
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
    """Returns x and x^T in eight bits, by one kernel, and their scale [1, 1]; raises ``largest`` as above."""
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
    and clear the first row of the history for the next pass. A matrix with only zeros keeps its scale."""
    of_all = history.amax(0)
    scales.copy_(torch.where(of_all > 0, of_all / largest_number, scales))
    history.copy_(history.roll(-1, 0))
    history[0].zero_()


class DelayedScaling(nn.Module):
    """The scales of all projections of some layers, and the magnitudes from which the next scales follow.

    Args:
        layers: the layers; weights for which :func:`is_multiplied` holds are multiplied in eight bits.
        history: the number of passes whose largest magnitude sets a scale.
        numbers: the largest numbers of the formats in forward and in backward.
        group: the ranks over which magnitudes are reduced; None: only this rank.
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
        """The history [h, n] and the scales [n] of forward or backward."""
        name = "forward" if forward else "backward"
        return getattr(self, f"{name}_history"), getattr(self, f"{name}_scales")

    def update(self, *, forward: bool) -> None:
        """Set the scales of the next pass."""
        history, scales = self.of(forward=forward)
        if self.group is not None:
            largest = history[0].clone()  # a copy, as the libraries join the magnitudes of all modules
            all_reduce(largest, self.group, dist.ReduceOp.MAX)
            history[0].copy_(largest)
        fp8_update_scales_(history, scales, self.numbers[forward])

    def entering(self, x: Tensor) -> Tensor:
        """Returns x, the layers' input; when its gradient arrives, backward has ended and sets scales."""
        result: Tensor = _ENTERING(x, lambda: self.update(forward=False))
        return result


@dataclass(frozen=True)
class Slot:
    """The place of one matrix in the lists of scales and magnitudes of a :class:`DelayedScaling`."""

    scaling: DelayedScaling
    matmul: int
    forward: bool
    place: int

    def _in(self, values: Tensor) -> Tensor:
        return values[PLACES_OF_A_MATMUL[self.forward] * self.matmul + self.place]

    @property
    def scale(self) -> Tensor:
        """The factor [] that turns a number in eight bits into its value."""
        return self._in(self.scaling.of(forward=self.forward)[1])

    @property
    def largest(self) -> Tensor:
        """The largest magnitude [] of the matrix in this pass so far."""
        return self._in(self.scaling.of(forward=self.forward)[0][0])


def _ended(gradient: Tensor, end: Callable[[], None]) -> Tensor:
    end()
    return gradient


_ENTERING = differentiable(lambda x, end: x.view_as(x), _ended, lambda x, end, y: (end,))


def is_multiplied(name: str, parameter: Tensor) -> bool:
    """Whether a parameter with this name in its module is the weight of a matmul. The name decides because
    the bias of several parts that are projected together also has two dims."""
    return parameter.ndim > 1 and name != "bias"


def _weights_of(layers: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in layers.modules():
        for name, weight in module._parameters.items():
            if weight is not None and is_multiplied(name, weight):
                yield module, name
