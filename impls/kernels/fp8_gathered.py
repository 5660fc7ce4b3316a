"""A projection in eight bits of positions that are spread over ranks, as in Megatron's sequence parallelism.

TransformerEngine's layers cast x to one byte an element before the all-gather, keep this rank's part, and
gather it again in backward (transformer_engine/pytorch/module/linear.py, 2.x). If x has one scale, it comes
from the largest magnitude on all ranks. For the weight's gradient, x in tiles of rows is cast a second time
here, where TransformerEngine keeps tiles of columns; the bytes are the same, but numbers are rounded twice.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce, joined, start_all_gather, start_reduce_scatter
from spbench.impls.kernels.fp8_casts import E4M3, WHOLE, Quantized, fp8_recast, multiply_fp8
from spbench.impls.kernels.fp8_projection import Fp8Recipe, cast_weight, weight_gradient_fp8, with_bias
from spbench.impls.kernels.projection import TRANSFORMER_ENGINE, bias_gradient, library_of


def project_gathered(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    recipe: Fp8Recipe,
    dim: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """x W^T + b [.., L, .., F] for the positions of all N ranks, where x [.., L/N, .., H] has L/N along
    ``dim``."""
    # a view of what the function returns, and not made within it, may be changed in place
    rows: Tensor = _GatheredProjection.apply(x, weight, bias, recipe, dim, group)
    return rows.view(*_whole_shape(x.shape, dim, group), rows.shape[-1])


class _GatheredProjection(torch.autograd.Function):
    """The autograd function of :func:`project_gathered`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, *how: Any) -> Tensor:
        recipe, dim, group = how
        rows = x.reshape(-1, x.shape[-1])
        largest = recipe.largest(rows, recipe.tile)
        if isinstance(largest, Tensor):
            all_reduce(largest, group, dist.ReduceOp.MAX)
        own = recipe.cast(rows, recipe.tile, E4M3, largest)
        b, b_t = cast_weight(weight, recipe)
        ctx.save_for_backward(own.data, own.scale, b_t.data, b_t.scale)
        ctx.weight, ctx.bias, ctx.recipe, ctx.dtype = weight, bias, recipe, x.dtype
        ctx.shape, ctx.dim, ctx.group = x.shape, dim, group
        a = gathered(own, x.shape, dim, group)
        by_engine = library_of(weight) == TRANSFORMER_ENGINE
        return with_bias(multiply_fp8(a, b.mT, x.dtype, by_engine=by_engine), bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        data, scale, b_data, b_scale = ctx.saved_tensors
        weight, recipe, dim, group = ctx.weight, ctx.recipe, ctx.dim, ctx.group
        by_engine = library_of(weight) == TRANSFORMER_ENGINE
        a, a_t = recipe.cast_both(d_y.reshape(-1, d_y.shape[-1]), "gradient")
        x = gathered(Quantized(data, scale, recipe.tile), ctx.shape, dim, group)
        b_t = Quantized(b_data, b_scale, recipe.weights)
        whole_d_x = multiply_fp8(a, b_t.mT, ctx.dtype, by_engine=by_engine)
        whole_d_x = whole_d_x.view(*_whole_shape(ctx.shape, dim, group), ctx.shape[-1])
        d_x, departure = start_reduce_scatter(whole_d_x, dim, group)
        if recipe.whole:
            x_t = recipe.transposed(x)
        else:
            data, scale = fp8_recast(x.data, x.scale, recipe.tile, recipe.scales)
            x_t = Quantized(data, scale, recipe.tile)
        d_weight = weight_gradient_fp8(a_t, x_t, weight, ctx.dtype)
        d_bias = None if ctx.bias is None else bias_gradient(d_y, ctx.bias)
        departure.wait()
        return d_x, d_weight, d_bias, None, None, None


def _whole_shape(shape: torch.Size, dim: int, group: dist.ProcessGroup) -> list[int]:
    """The shape of x with the positions of all ranks along ``dim``, without the last dim."""
    return [n * group.size() if place == dim else n for place, n in enumerate(shape[:-1])]


def gathered(own: Quantized, shape: torch.Size, dim: int, group: dist.ProcessGroup) -> Quantized:
    """The rows of all ranks in eight bits, from this rank's rows ``own`` of an x of this shape. Scales are
    gathered too, if rows have their own."""

    def of_all(x: Tensor) -> Tensor:
        # bytes, which every library of collectives sends
        parts, arrival = start_all_gather(x.view(*shape[:-1], -1).view(torch.uint8), group)
        arrival.wait()
        whole = joined(parts, dim)
        return whole.reshape(-1, whole.shape[-1]).view(x.dtype)

    scale = own.scale if own.tile == WHOLE else of_all(own.scale)
    return Quantized(of_all(own.data), scale, own.tile)
