"""A projection x W^T + b whose matmuls are in eight bits; a recipe says how matrices are scaled.

All three matmuls of a projection, y = x W^T, d_x = d_y W and d_W = d_y^T x, cast their operands first (see
:mod:`fp8_casts`). Sums are in float32, and results in the precision of x. Master weights, norms, attention,
embedding and head stay as they are.

The tensors kept for backward depend on the library. torchao keeps x and W uncast, with the largest magnitude
of each if the recipe has one scale for a matrix, and backward casts x and W again, transposed
(matmul_with_hp_or_float8_args of torchao/float8/float8_linear.py; a compiled program fuses each cast to one
kernel, as torchao/testing/training/roofline_utils.py counts). TransformerEngine casts x and x^T at once and
keeps only x^T in eight bits. It casts W and W^T in the first micro-batch of a step and keeps both for the
later micro-batches (transformer_engine/pytorch/module/linear.py, 2.x).

Letters: m rows of x, H features in, F out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

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
    fp8_transpose,
    multiply_fp8,
)
from spbench.impls.kernels.fp8_delayed import Slot, fp8_cast_both_delayed_, fp8_cast_delayed_, is_multiplied
from spbench.impls.kernels.kept_results import keeping, kept_number, kept_product
from spbench.impls.kernels.projection import (
    TRANSFORMER_ENGINE,
    added_to_main_grad,
    bias_gradient,
    library_of,
    matrix,
    weight_gradient,
)

#: the roles of a matrix in the matmuls of a projection
Operand = Literal["input", "weight", "gradient"]


@dataclass(frozen=True)
class Fp8Recipe:
    """How the operands of matmuls are scaled.

    Attributes:
        tile: the tile of activations and gradients; its columns lie along the summed dim of each matmul.
        weights: the tile of weights. gradients: the format of gradients; activations and weights are E4M3.
        scales: torch.float32: powers of two in float32; E8M0: powers of two in one byte; None: any float32.
        transposes: whether matmuls only take operands with a contiguous summed dim, as on Hopper. On
            Blackwell, a matrix with one scale needs no transposed copy (is_non_tn_fp8_gemm_supported of
            transformer_engine/pytorch/utils.py).
        delayed: whether scales come from earlier passes (:mod:`fp8_delayed`); ``slots`` then has the place
            of each matrix of a projection by its role: "input", "weight" or "gradient".
        wide_weight_gradient: whether the matmul for the weight's gradient stays in the precision of x; the
            matmul for the input's gradient then has one scale for the weight.
    """

    name: str
    tile: Tile = WHOLE
    weights: Tile = WHOLE
    gradients: torch.dtype = E4M3
    scales: torch.dtype | None = None
    wide_weight_gradient: bool = False
    transposes: bool = True
    delayed: bool = False
    slots: Mapping[str, Slot] | None = None

    @property
    def whole(self) -> bool:
        """Whether activations and gradients have one scale each."""
        return self.tile == WHOLE

    def largest(self, x: Tensor, tile: Tile, what: Operand = "input") -> Tensor | Slot | None:
        """The argument ``largest`` for a cast of x: the largest magnitude of x if x has one scale, the place
        of its scale if scales are delayed, else None."""
        if self.slots is not None:
            return self.slots[what]
        return fp8_amax(x) if tile == WHOLE else None

    def cast(
        self,
        x: Tensor,
        tile: Tile,
        dtype: torch.dtype,
        largest: Tensor | Slot | None,
        *,
        transposed: bool = False,
    ) -> Quantized:
        """Returns x [r, c] in eight bits, or x^T [c, r] if ``transposed``."""
        if isinstance(largest, Slot):
            data, scale = fp8_cast_delayed_(x, largest.scale, largest.largest, dtype, transposed)
            return Quantized(data, scale, WHOLE)
        data, scale = fp8_cast(x, largest, dtype, tile, self.scales, transposed)
        return Quantized(data, scale, tile)

    def cast_both(self, x: Tensor, what: Operand) -> tuple[Quantized, Quantized]:
        """Returns x [r, c] and x^T [c, r] in eight bits; ``what`` is the role of x."""
        tile = self.weights if what == "weight" else self.tile
        dtype = self.gradients if what == "gradient" else E4M3
        largest = self.largest(x, tile, what)
        if self.whole and not self.transposes:
            once = self.cast(x, tile, dtype, largest)
            return once, once.mT
        if isinstance(largest, Slot):
            data, transposed, scale = fp8_cast_both_delayed_(x, largest.scale, largest.largest, dtype)
            return Quantized(data, scale, WHOLE), Quantized(transposed, scale, WHOLE)
        data, scale, transposed, of_transposed = fp8_cast_both(x, largest, dtype, tile, self.scales)
        return Quantized(data, scale, tile), Quantized(transposed, of_transposed, tile)

    def transposed(self, x: Quantized) -> Quantized:
        """The transpose of a matrix with one scale: a copy if matmuls need a contiguous one, else a view."""
        return Quantized(fp8_transpose(x.data), x.scale.mT, WHOLE) if self.transposes else x.mT

    def project(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        """x W^T + b [..., F] for x [..., H], by the weight's library."""
        if library_of(weight) != TRANSFORMER_ENGINE:
            return self.project_all(x, [weight], [bias])[0]
        # a view of what the function returns, and not made within it, may be summed over ranks in place
        rows: Tensor = _EngineProjection.apply(x.reshape(-1, x.shape[-1]), weight, bias, self)
        return rows.view(*x.shape[:-1], rows.shape[-1])

    def project_all(
        self, x: Tensor, weights: Sequence[nn.Parameter], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """x W_g^T + b_g [..., F_g] for each weight W_g, by torch's library; x is cast only once."""
        rows, shared = x.reshape(-1, x.shape[-1]), [SharedCasts(len(weights)) for _ in range(2)]
        results = [_Projection.apply(rows, w, b, self, *shared) for w, b in zip(weights, biases, strict=True)]
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in results)


#: the recipes by their names in Megatron-LM and torchao. "tensorwise" is TransformerEngine's
#: Float8CurrentScaling and torchao's default, "delayed" DelayedScaling, "blockwise" Float8BlockScaling as in
#: DeepSeek-V3 (arXiv 2412.19437, section 3.3), "mxfp8" MXFP8BlockScaling; both rowwise recipes are torchao's
#: (float8/config.py)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Fp8Recipe("tensorwise", gradients=E5M2),
        Fp8Recipe("delayed", gradients=E5M2, delayed=True),
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


def mark_recipe(module: nn.Module, recipe: Fp8Recipe | None) -> None:
    """Have the projections of a module multiply by a recipe. Callers also do this before each forward,
    because backends that gather weights replace the tensors."""
    if recipe is None:
        return
    for each in module.modules():
        # backends that keep weights in one flat tensor leave views in the place of parameters
        slots = vars(each).get("spbench_fp8_slots", {})
        for name, weight in (*each._parameters.items(), *vars(each).items()):
            if isinstance(weight, Tensor) and is_multiplied(name, weight):
                own = replace(recipe, slots=slots.get(name)) if recipe.delayed else recipe
                weight.spbench_fp8 = own  # type: ignore[attr-defined]


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """y [m, F] plus a bias of F elements, if there is one."""
    if bias is None:
        return y
    return y + bias.flatten() if keeping() else y.add_(bias.flatten())


def weight_gradient_fp8(d_y_t: Quantized, x_t: Quantized, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the weight from d_y^T [F, m] and x^T [H, m] in eight bits, or a placeholder as in
    :func:`weight_gradient`."""
    by_engine = library_of(weight) == TRANSFORMER_ENGINE
    main = getattr(weight, "main_grad", None)
    if main is None:
        return multiply_fp8(d_y_t, x_t.mT, dtype, by_engine=by_engine).view(weight.shape)
    accumulate_fp8(matrix(main), d_y_t, x_t.mT, by_engine=by_engine)
    return added_to_main_grad(weight)


class SharedCasts:
    """The casts of an input that several projections share; each cast runs once, as in a compiled program.

    Args:
        uses: the number of uses after which a cast is freed.
    """

    def __init__(self, uses: int) -> None:
        self._uses, self._made = uses, dict[str, tuple[int, Any]]()

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the cast of this name; the first use computes it by ``make()``, the last use frees it."""
        used, made = self._made.pop(name, (0, None))
        made = make() if used == 0 else made
        if used + 1 < self._uses:
            self._made[name] = used + 1, made
        return made


class _Projection(torch.autograd.Function):
    """torchao's projection of x [m, H]; other projections of x share ``forward_casts`` and
    ``backward_casts``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, *how: Any) -> Tensor:
        recipe, forward_casts, backward_casts = how
        whole, of_x, of_weight = matrix(weight), None, None
        if recipe.whole:
            # torchtitan keeps these magnitudes where it keeps results of other operators
            of_x = forward_casts.once("largest", lambda: kept_number(lambda: fp8_amax(x)))
            of_weight = kept_number(lambda: fp8_amax(whole))

        def product() -> Tensor:
            a = forward_casts.once("rows", lambda: recipe.cast(x, recipe.tile, E4M3, of_x))
            b = recipe.cast(whole, recipe.weights, E4M3, of_weight)
            return multiply_fp8(a, b.mT, x.dtype, by_engine=False)

        y = kept_product(product)
        ctx.save_for_backward(x, of_x, of_weight)
        ctx.weight, ctx.bias, ctx.recipe, ctx.casts = weight, bias, recipe, backward_casts
        return with_bias(y, bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, of_x, of_weight = ctx.saved_tensors
        weight, recipe, whole = ctx.weight, ctx.recipe, matrix(ctx.weight)
        if recipe.whole:
            a, a_t = recipe.cast_both(d_y, "gradient")
        else:
            a = recipe.cast(d_y, recipe.tile, recipe.gradients, None)
        d_x = None
        if ctx.needs_input_grad[0]:
            tile = WHOLE if recipe.wide_weight_gradient else recipe.weights
            of_weight = recipe.largest(whole, tile) if of_weight is None else of_weight
            b_t = recipe.cast(whole, tile, E4M3, of_weight, transposed=True)
            d_x = multiply_fp8(a, b_t.mT, x.dtype, by_engine=False)
        d_bias = None if ctx.bias is None else bias_gradient(d_y, ctx.bias)
        others = None, None, None
        if recipe.wide_weight_gradient:
            return d_x, weight_gradient(d_y, x, weight), d_bias, *others
        if not recipe.whole:
            a_t = recipe.cast(d_y, recipe.tile, recipe.gradients, None, transposed=True)
        x_t = ctx.casts.once("columns", lambda: recipe.cast(x, recipe.tile, E4M3, of_x, transposed=True))
        return d_x, weight_gradient_fp8(a_t, x_t, weight, x.dtype), d_bias, *others


class _EngineProjection(torch.autograd.Function):
    """TransformerEngine's projection of x [m, H], where all rows of x are on this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, recipe: Fp8Recipe) -> Tensor:
        a, a_t = recipe.cast_both(x, "input")
        b, b_t = cast_weight(weight, recipe)
        ctx.save_for_backward(a_t.data, a_t.scale, b_t.data, b_t.scale)
        ctx.weight, ctx.bias, ctx.recipe, ctx.dtype = weight, bias, recipe, x.dtype
        return with_bias(multiply_fp8(a, b.mT, x.dtype, by_engine=True), bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, b_data, b_scale = ctx.saved_tensors
        weight, recipe = ctx.weight, ctx.recipe
        a, a_t = recipe.cast_both(d_y, "gradient")
        d_x = None
        if ctx.needs_input_grad[0]:
            b_t = Quantized(b_data, b_scale, recipe.weights)
            d_x = multiply_fp8(a, b_t.mT, ctx.dtype, by_engine=True)
        d_bias = None if ctx.bias is None else bias_gradient(d_y, ctx.bias)
        x_t = Quantized(x_data, x_scale, recipe.tile)
        return d_x, weight_gradient_fp8(a_t, x_t, weight, ctx.dtype), d_bias, None


def begin_step(module: nn.Module, number: int) -> None:
    """Have TransformerEngine cast weights again. A weight whose tensor stays from step to step is cast in the
    first micro-batch of a step, and its casts stay until the first micro-batch of the next step."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.spbench_fp8_step = number  # type: ignore[attr-defined]


def cast_weight(weight: nn.Parameter, recipe: Fp8Recipe) -> tuple[Quantized, Quantized]:
    """The weight and its transpose in eight bits, from this step's earlier casts if there are any."""
    whole, step = matrix(weight), getattr(weight, "spbench_fp8_step", None)
    made_in, casts = getattr(weight, "spbench_fp8_casts", (None, None))
    if casts is None or step is None or made_in != step:
        casts = None
        weight.spbench_fp8_casts = None, None  # type: ignore[attr-defined]  # free their memory first
        if (scale := getattr(weight, "spbench_fp8_scale", None)) is not None:  # kept in eight bits
            casts = Quantized(whole, scale, WHOLE), recipe.transposed(Quantized(whole, scale, WHOLE))
        else:
            casts = recipe.cast_both(whole, "weight")
        if step is not None:
            weight.spbench_fp8_casts = step, casts  # type: ignore[attr-defined]
    return casts
