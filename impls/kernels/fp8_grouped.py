"""A matmul of each expert's rows with the expert's own weight in eight bits, all in one call, as in
TransformerEngine's GroupedLinear (transformer_engine/pytorch/module/grouped_linear.py, 2.x).

Each expert's rows are a matrix with its own scales; weights are cast as in other projections. A cast of rows
returns the rows and, in a buffer of as many bytes, the transposes of each expert's rows, one after another.
Each cast is one operator here, where TransformerEngine may launch a kernel an expert. Rows are not padded to
the multiples that TransformerEngine's matmuls need.

Letters: R rows of all experts together, n experts, H features in, F out.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.kernels.fp8_casts import E4M3, Tile, _cast, _counts_as, _multiply, _scales_shape
from spbench.impls.kernels.fp8_projection import Fp8Recipe, cast_weight
from spbench.impls.kernels.operator import operator
from spbench.impls.kernels.projection import added_to_main_grad, matrix


def _scale_counts(rows: Sequence[int], columns: int, tile: Sequence[int]) -> tuple[list[int], list[int]]:
    """The number of scales of each expert's rows, and of the transpose of each expert's rows."""
    forward = [math.prod(_scales_shape((r, columns), tile)) for r in rows]
    return forward, [math.prod(_scales_shape((columns, r), tile)) for r in rows]


@operator(
    "spbench::fp8_amax_rows",
    fake=lambda x, rows: x.new_empty(len(rows), dtype=torch.promote_types(x.dtype, torch.float32)),
)
def fp8_amax_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The largest magnitude of each expert's rows of x, [n] in float32 or float64; 0 without rows."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    none = x.new_zeros((), dtype=dtype)
    parts = x.split(list(rows))
    return torch.stack([part.abs().amax().to(dtype) if len(part) else none for part in parts])


@operator("spbench::fp8_cast_rows")
def fp8_cast_rows(
    x: Tensor,
    rows: Sequence[int],
    largest: Tensor | None,
    dtype: torch.dtype,
    tile: Sequence[int],
    scales: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x [R, c] in eight bits with its scales in a flat tensor, and the transposes of each expert's
    rows one after another in a buffer [R, c] with their scales in a flat tensor."""
    data, of_data, turned, of_turned = (list[Tensor]() for _ in range(4))
    for number, part in enumerate(x.split(list(rows))):
        if not len(part):
            continue
        known = None if largest is None else largest[number]
        for results, of_results, each in ((data, of_data, part), (turned, of_turned, part.mT)):
            cast, scale = _cast(each, known, dtype, tile, scales)
            results.append(cast.flatten())
            of_results.append(scale.flatten())
    joined = torch.cat(data).view(x.shape), torch.cat(turned).view(x.shape)
    return joined[0], torch.cat(of_data), joined[1], torch.cat(of_turned)


@fp8_cast_rows.register_fake
def _(x: Tensor, rows: Sequence[int], *how: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, dtype, tile, scales = how
    counts = [sum(each) for each in _scale_counts(rows, x.shape[1], tile)]
    of_data, of_turned = (x.new_empty(n, dtype=scales or torch.float32) for n in counts)
    return x.new_empty(x.shape, dtype=dtype), of_data, x.new_empty(x.shape, dtype=dtype), of_turned


def _turned(
    data: Tensor, scale: Tensor, rows: Sequence[int], tile: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """The values of the transpose [c, r] of each expert's rows, in at least float32."""
    columns = data.shape[1]
    _, counts = _scale_counts(rows, columns, tile)
    parts = zip(data.flatten().split([r * columns for r in rows]), scale.split(counts), rows, strict=True)
    shapes = [_scales_shape((columns, r), tile) for r in rows]
    return [
        _counts_as(x.view(columns, r), of_x.view(shape), tile, dtype)
        for (x, of_x, r), shape in zip(parts, shapes, strict=True)
    ]


@operator(
    "spbench::te_fp8_grouped_mm",
    fake=lambda a, b, *others: a.new_empty(a.shape[0], b[0].shape[1], dtype=others[-1]),
)
def te_fp8_grouped_mm(
    a: Tensor,
    b: Sequence[Tensor],
    of_a: Tensor,
    of_b: Sequence[Tensor],
    rows: Sequence[int],
    tiles: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Returns the matmul of each expert's rows of a [R, k] and the expert's b [k, n], [R, n] in ``dtype``."""
    counts, _ = _scale_counts(rows, a.shape[1], tiles[:2])
    results = []
    for part, scale, w, of_w in zip(a.split(list(rows)), of_a.split(counts), b, of_b, strict=True):
        shaped = scale.view(_scales_shape(part.shape, tiles[:2]))
        results.append(_multiply(part, w, shaped, of_w, tiles, dtype).to(dtype))
    return torch.cat(results)


@operator("spbench::te_fp8_grouped_mm_weights")
def te_fp8_grouped_mm_weights(
    d_y: Tensor,
    x: Tensor,
    of_d_y: Tensor,
    of_x: Tensor,
    rows: Sequence[int],
    tile: Sequence[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    """The gradient [F, H] of each expert's weight, from the transposes of d_y [R, F] and of x [R, H] in the
    buffers of :func:`fp8_cast_rows`."""
    of_all = (_turned(*each, rows, tile, dtype) for each in ((d_y, of_d_y), (x, of_x)))
    parts = zip(*of_all, strict=True)
    return [(d @ part.mT).to(dtype) for d, part in parts]


@te_fp8_grouped_mm_weights.register_fake
def _(d_y: Tensor, x: Tensor, *others: Any) -> list[Tensor]:
    *_, rows, _, dtype = others
    return [x.new_empty(d_y.shape[1], x.shape[1], dtype=dtype) for _ in rows]


@operator("spbench::te_fp8_grouped_accumulate_mm_", mutates_args={"into"})
def te_fp8_grouped_accumulate_mm_(
    into: Sequence[Tensor],
    d_y: Tensor,
    x: Tensor,
    of_d_y: Tensor,
    of_x: Tensor,
    rows: Sequence[int],
    tile: Sequence[int],
) -> None:
    """Add each gradient of :func:`te_fp8_grouped_mm_weights` to the expert's buffer [F, H] of ``into``."""
    of_all = (_turned(*each, rows, tile, into[0].dtype) for each in ((d_y, of_d_y), (x, of_x)))
    for total, d, part in zip(into, *of_all, strict=True):
        total.add_((d @ part.mT).to(total.dtype))


def _cast_rows(
    x: Tensor, rows: Sequence[int], recipe: Fp8Recipe, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    largest = fp8_amax_rows(x, rows) if recipe.whole else None
    return fp8_cast_rows(x, rows, largest, dtype, recipe.tile, recipe.scales)


class _GroupedProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Sequence[int], recipe: Fp8Recipe, *weights: nn.Parameter
    ) -> Tensor:
        data, scale, x_t, of_x_t = _cast_rows(x, rows, recipe, E4M3)
        casts = [cast_weight(weight, recipe) for weight in weights]
        turned = [each for _, b_t in casts for each in (b_t.data, b_t.scale)]
        ctx.save_for_backward(x_t, of_x_t, *turned)
        ctx.rows, ctx.recipe, ctx.weights, ctx.dtype = rows, recipe, weights, x.dtype
        b = [each.mT for each, _ in casts]
        tiles = [*recipe.tile, *b[0].tile]
        return te_fp8_grouped_mm(data, [w.data for w in b], scale, [w.scale for w in b], rows, tiles, x.dtype)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x_t, of_x_t, *turned = ctx.saved_tensors
        rows, recipe, weights = ctx.rows, ctx.recipe, ctx.weights
        data, scale, d_y_t, of_d_y_t = _cast_rows(d_y.contiguous(), rows, recipe, recipe.gradients)
        d_x = None
        if ctx.needs_input_grad[0]:
            tile: Tile = (recipe.weights[1], recipe.weights[0])
            b, of_b = [each.mT for each in turned[::2]], [each.mT for each in turned[1::2]]
            d_x = te_fp8_grouped_mm(data, b, scale, of_b, rows, [*recipe.tile, *tile], ctx.dtype)
        given = d_y_t, x_t, of_d_y_t, of_x_t, rows, recipe.tile
        if getattr(weights[0], "main_grad", None) is None:
            gradients = te_fp8_grouped_mm_weights(*given, ctx.dtype)
            return d_x, None, None, *(d.view(w.shape) for d, w in zip(gradients, weights, strict=True))
        te_fp8_grouped_accumulate_mm_([matrix(weight.main_grad) for weight in weights], *given)
        return d_x, None, None, *(added_to_main_grad(weight) for weight in weights)


def grouped_project_fp8(
    x: Tensor, weights: Sequence[nn.Parameter], rows: Sequence[int], recipe: Fp8Recipe
) -> Tensor:
    """As :func:`grouped_project`, but in eight bits by a recipe of TransformerEngine."""
    result: Tensor = _GroupedProjection.apply(x, tuple(rows), recipe, *weights)
    return result
