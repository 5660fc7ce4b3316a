"""A projection x W^T + b whose matmuls are in eight bits, by a recipe.

All three matmuls of a projection, y = x W^T, d_x = d_y W and d_W = d_y^T x, cast their operands first (see
:mod:`fp8_casts`). Sums are in float32, and results in the precision of x. Master weights, norms, attention,
embedding and head stay as they are.

What is kept for backward depends on the library. torchao keeps x and W as they are, with the largest
magnitude of each where the recipe has one scale for all, and casts them again in backward, transposed
(matmul_with_hp_or_float8_args of torchao/float8/float8_linear.py; a compiled program fuses each cast to one
kernel, as torchao/testing/training/roofline_utils.py counts them). TransformerEngine casts x both ways at
once and keeps x^T in eight bits alone; it casts W both ways in the first micro-batch of a step and keeps both
for the others (transformer_engine/pytorch/module/linear.py, 2.x).

Letters: m rows of x, H features in, F out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.kernels.fp8_casts import (
    E4M3,
    E5M2,
    E8M0,
    WHOLE,
    Quantized,
    Tile,
    accumulate_fp8,
    fp8_amax,
    fp8_cast,
    fp8_cast_both,
    multiply_fp8,
)
from spbench.impls.kernels.projection import (
    TRANSFORMER_ENGINE,
    added_to_main_grad,
    bias_gradient,
    library_of,
    matrix,
    weight_gradient,
)


@dataclass(frozen=True)
class Fp8Recipe:
    """How the operands of matmuls are scaled.

    Attributes:
        tile: of activations and gradients, as each matmul reads them: its columns lie along the summed dim.
        weights: of weights.
        gradients: the format of gradients; activations and weights are E4M3.
        scales: torch.float32: powers of two in float32; E8M0: in one byte; None: any float32.
        wide_weight_gradient: the matmul of the weight's gradient stays in the precision of x, and that of the
            input's gradient has one scale for the weight.
    """

    name: str
    tile: Tile = WHOLE
    weights: Tile = WHOLE
    gradients: torch.dtype = E4M3
    scales: torch.dtype | None = None
    wide_weight_gradient: bool = False

    @property
    def whole(self) -> bool:
        """Whether activations and gradients have one scale each."""
        return self.tile == WHOLE

    def largest(self, x: Tensor, tile: Tile) -> Tensor | None:
        """The largest magnitude of x, where its scale needs one of all."""
        return fp8_amax(x) if tile == WHOLE else None

    def cast(
        self, x: Tensor, tile: Tile, dtype: torch.dtype, largest: Tensor | None, *, transposed: bool = False
    ) -> Quantized:
        """x [r, c] in eight bits, or x^T."""
        return Quantized(*fp8_cast(x, largest, dtype, tile, self.scales, transposed), tile)

    def cast_both(
        self, x: Tensor, tile: Tile, dtype: torch.dtype, largest: Tensor | None
    ) -> tuple[Quantized, Quantized]:
        """x [r, c] and x^T in eight bits."""
        data, scale, transposed, of_transposed = fp8_cast_both(x, largest, dtype, tile, self.scales)
        return Quantized(data, scale, tile), Quantized(transposed, of_transposed, tile)

    def project(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        """x [..., H] W^T + b -> [..., F]."""
        of = _EngineProjection if library_of(weight) == TRANSFORMER_ENGINE else _Projection
        # a view of what the function returns, and not made within it, may be summed over ranks in place
        rows: Tensor = of.apply(x.reshape(-1, x.shape[-1]), weight, bias, self)
        return rows.view(*x.shape[:-1], rows.shape[-1])


#: by the names that Megatron-LM and torchao give them. Tensorwise: TransformerEngine's Float8CurrentScaling,
#: torchao's default. Blockwise: Float8BlockScaling, as DeepSeek-V3 has it (arXiv 2412.19437, section 3.3).
#: mxfp8: MXFP8BlockScaling. Rowwise, and that with a wide weight gradient: torchao's (float8/config.py)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Fp8Recipe("tensorwise", gradients=E5M2),
        Fp8Recipe("rowwise", tile=(1, 0), weights=(1, 0), scales=torch.float32),
        Fp8Recipe(
            "rowwise_with_gw_hp",
            tile=(1, 0),
            weights=(1, 0),
            scales=torch.float32,
            wide_weight_gradient=True,
        ),
        Fp8Recipe("blockwise", tile=(1, 128), weights=(128, 128), scales=torch.float32),
        Fp8Recipe("mxfp8", tile=(1, 32), weights=(1, 32), scales=E8M0),
    )
}


def mark_recipe(module: nn.Module, name: str) -> None:
    """Have the projections of a module multiply by a recipe of RECIPES. Called before each forward, as
    backends that gather weights put other tensors in their place."""
    recipe = RECIPES[name]
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.spbench_fp8 = recipe  # type: ignore[attr-defined]


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias.flatten())


def weight_gradient_fp8(d_y_t: Quantized, x_t: Quantized, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the weight, from d_y^T [F, m] and x^T [H, m] in eight bits; see
    :func:`weight_gradient`."""
    by_engine = library_of(weight) == TRANSFORMER_ENGINE
    main = getattr(weight, "main_grad", None)
    if main is None:
        return multiply_fp8(d_y_t, x_t.mT, dtype, by_engine=by_engine).view(weight.shape)
    accumulate_fp8(matrix(main), d_y_t, x_t.mT, by_engine=by_engine)
    return added_to_main_grad(weight)


class _Projection(torch.autograd.Function):
    """torchao's, of x [m, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, recipe: Fp8Recipe) -> Tensor:
        whole = matrix(weight)
        of_x, of_weight = recipe.largest(x, recipe.tile), recipe.largest(whole, recipe.weights)
        ctx.save_for_backward(x, of_x, of_weight)
        ctx.weight, ctx.bias, ctx.recipe = weight, bias, recipe
        a = recipe.cast(x, recipe.tile, E4M3, of_x)
        b = recipe.cast(whole, recipe.weights, E4M3, of_weight)
        return _with_bias(multiply_fp8(a, b.mT, x.dtype, by_engine=False), bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, of_x, of_weight = ctx.saved_tensors
        weight, recipe, whole = ctx.weight, ctx.recipe, matrix(ctx.weight)
        largest = recipe.largest(d_y, recipe.tile)
        if recipe.whole:
            a, a_t = recipe.cast_both(d_y, recipe.tile, recipe.gradients, largest)
        else:
            a = recipe.cast(d_y, recipe.tile, recipe.gradients, None)
        d_x = None
        if ctx.needs_input_grad[0]:
            tile = WHOLE if recipe.wide_weight_gradient else recipe.weights
            of_weight = recipe.largest(whole, tile) if of_weight is None else of_weight
            b_t = recipe.cast(whole, tile, E4M3, of_weight, transposed=True)
            d_x = multiply_fp8(a, b_t.mT, x.dtype, by_engine=False)
        d_bias = None if ctx.bias is None else bias_gradient(d_y, ctx.bias)
        if recipe.wide_weight_gradient:
            return d_x, weight_gradient(d_y, x, weight), d_bias, None
        if not recipe.whole:
            a_t = recipe.cast(d_y, recipe.tile, recipe.gradients, None, transposed=True)
        x_t = recipe.cast(x, recipe.tile, E4M3, of_x, transposed=True)
        return d_x, weight_gradient_fp8(a_t, x_t, weight, x.dtype), d_bias, None


class _EngineProjection(torch.autograd.Function):
    """TransformerEngine's, of x [m, H] that is not gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, recipe: Fp8Recipe) -> Tensor:
        a, a_t = recipe.cast_both(x, recipe.tile, E4M3, recipe.largest(x, recipe.tile))
        b, b_t = cast_weight(weight, recipe)
        ctx.save_for_backward(a_t.data, a_t.scale, b_t.data, b_t.scale)
        ctx.weight, ctx.bias, ctx.recipe, ctx.dtype = weight, bias, recipe, x.dtype
        return _with_bias(multiply_fp8(a, b.mT, x.dtype, by_engine=True), bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, b_data, b_scale = ctx.saved_tensors
        weight, recipe, largest = ctx.weight, ctx.recipe, ctx.recipe.largest(d_y, ctx.recipe.tile)
        a, a_t = recipe.cast_both(d_y, recipe.tile, recipe.gradients, largest)
        d_x = None
        if ctx.needs_input_grad[0]:
            b_t = Quantized(b_data, b_scale, recipe.weights)
            d_x = multiply_fp8(a, b_t.mT, ctx.dtype, by_engine=True)
        d_bias = None if ctx.bias is None else bias_gradient(d_y, ctx.bias)
        x_t = Quantized(x_data, x_scale, recipe.tile)
        return d_x, weight_gradient_fp8(a_t, x_t, weight, ctx.dtype), d_bias, None


def cast_weight(weight: nn.Parameter, recipe: Fp8Recipe) -> tuple[Quantized, Quantized]:
    """The weight and its transpose in eight bits."""
    whole = matrix(weight)
    return recipe.cast_both(whole, recipe.weights, E4M3, recipe.largest(whole, recipe.weights))
