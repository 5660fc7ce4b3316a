"""A matmul of each expert's rows with the expert's own weight, all in one call (grouped GEMM).

The weights are one parameter an expert, or one for all experts of a rank, stacked (torch's ``_grouped_mm``).
The rows of all experts lie one after another. The host knows each expert's number of rows, ``rows[i]``,
because libraries need it: TransformerEngine's GroupedLinear as a list, torch's ``_grouped_mm`` as offsets.

Letters: R rows of all experts together, n experts, H features in, F out.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.kernels.operator import differentiable, operator
from spbench.impls.kernels.projection import (
    TORCH_PRODUCTS,
    TRANSFORMER_ENGINE,
    TRANSFORMER_ENGINE_PRODUCTS,
    added_to_main_grad,
    library_of,
    matrix,
)

#: the workspaces of TransformerEngine's grouped matmuls, by the name in meters, and their number: one for
#: each stream of these matmuls (get_cublas_workspace of pytorch/cpp_extensions/gemm.py,
#: nvte_get_num_compute_streams)
GROUPED_WORKSPACES, GROUPED_STREAMS = "transformer_engine_grouped", 4
#: operators with one matmul for each expert -> the position of the argument with the rows
GROUPED_MATMULS = {
    "grouped_mm": 0,
    "te_grouped_mm": 0,
    "grouped_mm_weights": 0,
    "te_grouped_mm_weights": 0,
    "grouped_accumulate_mm_": 1,
    "te_grouped_accumulate_mm_": 1,
    "te_fp8_grouped_mm": 0,
    "te_fp8_grouped_mm_weights": 0,
    "te_fp8_grouped_accumulate_mm_": 1,
    "stacked_mm": 0,
    "stacked_mm_weights": 0,
    "stacked_accumulate_mm_": 1,
}


def workspace(name: str) -> str | None:
    """The name, in a cluster's file, of the library whose workspace the operator of this name uses; None: the
    operator needs no workspace."""
    if name in GROUPED_MATMULS:
        return GROUPED_WORKSPACES if name.startswith("te_") else None
    if name in TRANSFORMER_ENGINE_PRODUCTS:
        return "transformer_engine"
    return "cublas" if name in TORCH_PRODUCTS or name.removesuffix("_") in TORCH_PRODUCTS else None


def _multiply(x: Tensor, weights: Sequence[Tensor] | Tensor, rows: Sequence[int]) -> Tensor:
    y = x.new_empty(x.shape[0], weights[0].shape[1])
    for part, weight, out in zip(x.split(list(rows)), weights, y.split(list(rows)), strict=True):
        torch.mm(part, weight, out=out)
    return y


def _weight_gradients(d_y: Tensor, x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    return [d.mT @ part for d, part in zip(d_y.split(list(rows)), x.split(list(rows)), strict=True)]


def _accumulate(into: Sequence[Tensor] | Tensor, d_y: Tensor, x: Tensor, rows: Sequence[int]) -> None:
    for total, d, part in zip(into, d_y.split(list(rows)), x.split(list(rows)), strict=True):
        total.addmm_(d.mT.to(total.dtype), part.to(total.dtype))


def _products(prefix: str) -> tuple[Any, Any, Any]:
    """The operators of one library: rows times weights, weights' gradients, and these added to buffers."""

    @operator(f"spbench::{prefix}grouped_mm")
    def grouped_mm(x: Tensor, weights: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        return _multiply(x, weights, rows)

    @grouped_mm.register_fake
    def _(x: Tensor, weights: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        return x.new_empty(x.shape[0], weights[0].shape[1])

    @operator(f"spbench::{prefix}grouped_mm_weights")
    def grouped_mm_weights(d_y: Tensor, x: Tensor, rows: Sequence[int]) -> list[Tensor]:
        return _weight_gradients(d_y, x, rows)

    @grouped_mm_weights.register_fake
    def _(d_y: Tensor, x: Tensor, rows: Sequence[int]) -> list[Tensor]:
        return [x.new_empty(d_y.shape[1], x.shape[1]) for _ in rows]

    @operator(f"spbench::{prefix}grouped_accumulate_mm_", mutates_args={"into"})
    def grouped_accumulate_mm_(into: Sequence[Tensor], d_y: Tensor, x: Tensor, rows: Sequence[int]) -> None:
        _accumulate(into, d_y, x, rows)

    return grouped_mm, grouped_mm_weights, grouped_accumulate_mm_


_TORCH = _products("")
_ENGINE = _products("te_")


#: each row of a matrix of ``_grouped_mm`` must be a multiple of this many bytes
_ROW_BYTES = 16


def _by_torch(x: Tensor, other: int) -> bool:
    """Whether torch has, on this GPU, one kernel for all experts' matmuls of rows x [R, c] with ``other``
    features on the other side."""
    if x.dtype != torch.bfloat16 or x.numel() == 0:
        return False
    if any(features * x.element_size() % _ROW_BYTES for features in (x.shape[1], other)):
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)


def _ends(rows: Sequence[int], x: Tensor) -> Tensor:
    """The number after the last row of each expert, int32 [n], on the device of x."""
    return torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=x.device)


@operator("spbench::stacked_mm", fake=lambda x, weights, rows: x.new_empty(x.shape[0], weights.shape[-1]))
def _stacked_mm(x: Tensor, weights: Tensor, rows: Sequence[int]) -> Tensor:
    return _multiply(x, weights, rows)


@_stacked_mm.register_kernel("cuda", lambda x, weights, rows: _by_torch(x, weights.shape[-1]))
def _(x: Tensor, weights: Tensor, rows: Sequence[int]) -> Tensor:
    return torch._grouped_mm(x, weights, offs=_ends(rows, x))


@operator(
    "spbench::stacked_mm_weights", fake=lambda d_y, x, rows: x.new_empty(len(rows), d_y.shape[1], x.shape[1])
)
def _stacked_mm_weights(d_y: Tensor, x: Tensor, rows: Sequence[int]) -> Tensor:
    gradients = x.new_empty(len(rows), d_y.shape[1], x.shape[1])
    for out, d, part in zip(gradients, d_y.split(list(rows)), x.split(list(rows)), strict=True):
        torch.mm(d.mT, part, out=out)
    return gradients


@_stacked_mm_weights.register_kernel("cuda", lambda d_y, x, rows: _by_torch(x, d_y.shape[1]))
def _(d_y: Tensor, x: Tensor, rows: Sequence[int]) -> Tensor:
    return torch._grouped_mm(d_y.mT, x, offs=_ends(rows, x))


@operator("spbench::stacked_accumulate_mm_", mutates_args={"into"})
def _stacked_accumulate_mm_(into: Tensor, d_y: Tensor, x: Tensor, rows: Sequence[int]) -> None:
    _accumulate(into, d_y, x, rows)


#: the operators of stacked weights, where a library's are those of :func:`_products`
_STACKED = _stacked_mm, _stacked_mm_weights, _stacked_accumulate_mm_


def _matrices(weights: Sequence[Tensor], stacked: bool) -> Any:
    """The weights [..., F, H] as views [F of all, H]; stacked ones [n, ..., F, H] as [n, F of all, H]."""
    if not stacked:
        return [matrix(weight) for weight in weights]
    (weight,) = weights
    return weight if weight.ndim == 3 else weight.flatten(1, -2)


def stacked_project(x: Tensor, weights: nn.Parameter, rows: Sequence[int]) -> Tensor:
    """Returns the ``rows[i]`` rows of each expert i in x [R, H] times W_i^T, from weights [n, ..., F, H], as
    [R, all F], by one operator; the weights have one gradient."""
    result: Tensor = _GroupedProjection.apply(x, tuple(rows), True, weights)
    return result


class _GroupedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Sequence[int], stacked: bool, *weights: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x if weights[0].requires_grad else None)
        ctx.weights = weights  # the parameters, not views, as attributes are marked on them
        ctx.rows, ctx.stacked = rows, stacked
        multiply, _, _ = _operators(weights[0], stacked)
        whole = _matrices(weights, stacked)
        return multiply(x, whole.mT if stacked else [w.mT for w in whole], rows)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weights, stacked = ctx.weights, ctx.stacked
        multiply, _, _ = _operators(weights[0], stacked)
        d_y = d_y.contiguous()
        d_x = multiply(d_y, _matrices(weights, stacked), ctx.rows) if ctx.needs_input_grad[0] else None
        frozen = [None] * len(weights)
        gradients = frozen if x is None else _gradients(d_y, x, ctx.rows, weights, stacked)
        return d_x, None, None, *gradients


def _operators(weight: Tensor, stacked: bool) -> tuple[Any, Any, Any]:
    if stacked:
        return _STACKED
    return _ENGINE if library_of(weight) == TRANSFORMER_ENGINE else _TORCH


def _gradients(
    d_y: Tensor, x: Tensor, rows: Sequence[int], weights: Sequence[nn.Parameter], stacked: bool
) -> list[Tensor]:
    """The gradients of all experts' weights; each is added to ``main_grad`` if there is one."""
    _, of_weights, accumulate = _operators(weights[0], stacked)
    if getattr(weights[0], "main_grad", None) is None:
        gradients = of_weights(d_y, x, rows)
        each = [gradients] if stacked else gradients
        return [d.view(w.shape) for d, w in zip(each, weights, strict=True)]
    mains = [getattr(weight, "main_grad") for weight in weights]  # noqa: B009
    accumulate(_matrices(mains, stacked), d_y, x, rows)
    return [added_to_main_grad(weight) for weight in weights]


def grouped_project(x: Tensor, weights: Sequence[nn.Parameter], rows: Sequence[int]) -> Tensor:
    """Returns the ``rows[i]`` rows of each expert i in x [R, H] times W_i^T, from one weight [..., F, H] an
    expert, as [R, all F]."""
    result: Tensor = _GroupedProjection.apply(x, tuple(rows), False, *weights)
    return result


@operator("spbench::grouped_bias", fake=lambda y, biases, rows, weights: torch.empty_like(y))
def _grouped_bias(y: Tensor, biases: Sequence[Tensor], rows: Sequence[int], weights: Tensor | None) -> Tensor:
    added = torch.cat([bias.expand(n, -1) for bias, n in zip(biases, rows, strict=True)])
    return y + (added if weights is None else added * weights.to(y.dtype)[:, None])


@operator("spbench::grouped_bias_backward")
def _grouped_bias_backward(
    d_y: Tensor, biases: Sequence[Tensor], rows: Sequence[int], weights: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    weighted = d_y if weights is None else d_y * weights.to(d_y.dtype)[:, None]
    d_biases = [part.sum(0) for part in weighted.split(list(rows))]
    if weights is None:
        return d_biases, d_y.new_empty(0)
    parts = zip(d_y.split(list(rows)), biases, strict=True)
    return d_biases, torch.cat([(part * bias).sum(1) for part, bias in parts]).to(weights.dtype)


@_grouped_bias_backward.register_fake
def _(
    d_y: Tensor, biases: Sequence[Tensor], rows: Sequence[int], weights: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    d_biases = [d_y.new_empty(d_y.shape[1]) for _ in rows]
    return d_biases, d_y.new_empty(0) if weights is None else torch.empty_like(weights)


def _bias_gradients(
    d_y: Tensor, rows: Sequence[int], weights: Tensor | None, *biases: Tensor
) -> tuple[Tensor | None, ...]:
    d_biases, d_weights = _grouped_bias_backward(d_y, biases, rows, weights)
    return d_y, None, d_weights, *d_biases


_GROUPED_BIAS = differentiable(
    lambda y, rows, weights, *biases: _grouped_bias(y, biases, rows, weights),
    _bias_gradients,
    lambda y, *others: others[:-1],
)


def add_grouped_bias(
    y: Tensor, biases: Sequence[Tensor], rows: Sequence[int], weights: Tensor | None = None
) -> Tensor:
    """Returns y [R, F] plus, on the ``rows[i]`` rows of each expert i, the expert's bias [F] times the row's
    weight [R] (None: 1)."""
    result: Tensor = _GROUPED_BIAS(y, tuple(rows), weights, *biases)
    return result
