"""Casts to eight bits, and matmuls of matrices in eight bits.

A matrix is cut into tiles, each with its own scale: one tile for all ("tensorwise"), a tile a row, or tiles
of 1 x 128, 128 x 128 or 1 x 32. The scale brings a tile's largest magnitude to the largest number of the
format: x is kept as round(x / scale), and its value is that number times scale. TransformerEngine calls this
scale ``scale_inv``.

Each cast is one kernel, as in TransformerEngine and compiled torchao. The kernel reads a matrix in its own
precision once and writes it in eight bits, by rows, transposed, or both. Hopper's matmuls only take operands
whose summed dim is contiguous, so backward needs the transposed copies. The largest magnitude of a whole
matrix takes another kernel before the cast. On a GPU with eight-bit matmuls, casts by rows or by one scale
and their matmuls run as such kernels, with the card's fast sums, which libraries use only in forward. In all
other cases and on a CPU, matmuls run on the casts' values in float32.

Formats: e4m3 has 3 bits of fraction and numbers up to 448, e5m2 has 2 and numbers up to 57344 (arXiv
2209.05433). A scale that is a power of two is rounded up, so that nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spbench.impls.kernels.operator import operator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: the dtype of one-byte scales, always powers of two (Open Compute Project, Microscaling Formats 1.0)
E8M0 = torch.float8_e8m0fnu
#: the least value for the largest magnitude of a tile, as in torchao (float8_utils.py)
_SMALLEST = 1e-12

#: rows and columns of a tile; 0: all of the matrix
Tile = tuple[int, int]
WHOLE: Tile = (0, 0)


class Quantized(NamedTuple):
    """A matrix in eight bits.

    Attributes:
        data: the numbers in eight bits [r, c].
        scale: the scale of each tile, [ceil(r / rows of a tile), ceil(c / columns of a tile)].
    """

    data: Tensor
    scale: Tensor
    tile: Tile

    @property
    def mT(self) -> Quantized:
        """A view of the transposed matrix."""
        return Quantized(self.data.mT, self.scale.mT, (self.tile[1], self.tile[0]))


def whole_tile(shape: Sequence[int], tile: Sequence[int]) -> Tile:
    """The rows and columns of a tile, where 0 is replaced by all rows or columns of the matrix."""
    return tile[0] or max(1, shape[0]), tile[1] or max(1, shape[1])


def _scales_shape(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, int]:
    rows, columns = whole_tile(shape, tile)
    return math.ceil(shape[0] / rows), math.ceil(shape[1] / columns)


def _spread(scale: Tensor, shape: Sequence[int], tile: Sequence[int]) -> Tensor:
    """The scale of each element [r, c], from the scales of the tiles."""
    rows, columns = whole_tile(shape, tile)
    scale = scale.float() if scale.dtype == E8M0 else scale
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def _largest_by_tile(x: Tensor, tile: Sequence[int]) -> Tensor:
    rows, columns = whole_tile(x.shape, tile)
    r, c = _scales_shape(x.shape, tile)
    padded = x.new_zeros(r * rows, c * columns)
    padded[: x.shape[0], : x.shape[1]] = x.abs()
    return padded.view(r, rows, c, columns).amax((1, 3))


def scale_of(largest: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """The float32 scales of tiles with these largest magnitudes; never 0, also for tiles of zeros."""
    scale = (largest.double().clamp(min=_SMALLEST) / torch.finfo(dtype).max).float()
    return torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale


def _cast(
    x: Tensor, largest: Tensor | None, dtype: torch.dtype, tile: Sequence[int], scales: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    if largest is None:
        largest = _largest_by_tile(x, tile)
    scale = scale_of(largest.reshape(_scales_shape(x.shape, tile)), dtype, power_of_two=scales is not None)
    exact = x if x.dtype == torch.float64 else x.float()
    limit = torch.finfo(dtype).max
    data = (exact / _spread(scale, x.shape, tile)).clamp(-limit, limit).to(dtype)
    return data.contiguous(), scale.to(scales or torch.float32)


@cache
def _multiplies_eight_bits() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def _kernels(x: Tensor, tile: Sequence[int], scales: torch.dtype | None) -> Any:
    """The module of Triton kernels, if these can cast x with this tile on the current GPU; else None."""
    by_rows = tuple(tile) == (1, 0) and scales != E8M0
    if (
        x.dtype == torch.float64
        or not (by_rows or (tuple(tile) == WHOLE and scales is None))
        or not x.numel()
    ):
        return None
    if not _multiplies_eight_bits() or find_spec("triton") is None:
        return None
    return import_module("spbench.impls.kernels.fp8_triton")


@operator(
    "spbench::fp8_amax", fake=lambda x: x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
)
def fp8_amax(x: Tensor) -> Tensor:
    """The largest magnitude of x as a scalar [] in float32, or in float64 if x is float64."""
    return x.abs().amax().to(torch.promote_types(x.dtype, torch.float32))


@fp8_amax.register_kernel("cuda")
def _(x: Tensor) -> Tensor:
    # one kernel that writes one number
    return torch.linalg.vector_norm(x, torch.inf, dtype=torch.promote_types(x.dtype, torch.float32))


def _room(
    x: Tensor, transposed: bool, dtype: torch.dtype, tile: Sequence[int], scales: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Tensors without values, for x [r, c] or x^T [c, r] in eight bits and its scales."""
    shape = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    scale = x.new_empty(_scales_shape(shape, tile), dtype=scales or torch.float32)
    return x.new_empty(shape, dtype=dtype), scale


@operator(
    "spbench::fp8_cast",
    fake=lambda x, largest, dtype, tile, scales, transposed: _room(x, transposed, dtype, tile, scales),
)
def fp8_cast(
    x: Tensor,
    largest: Tensor | None,
    dtype: torch.dtype,
    tile: Sequence[int],
    scales: torch.dtype | None,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """Returns x [r, c], or x^T [c, r] if ``transposed``, in eight bits, and its scales."""
    return _cast(x.mT if transposed else x, largest, dtype, tile, scales)


@fp8_cast.register_kernel("cuda")
def _(x: Tensor, largest: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    dtype, tile, scales, transposed = how
    view, kernels = x.mT if transposed else x, _kernels(x, tile, scales)
    if kernels is None:
        return _cast(view, largest, dtype, tile, scales)
    if tuple(tile) != WHOLE:
        by_rows: tuple[Tensor, Tensor] = kernels.cast_by_rows(view, dtype, _SMALLEST, scales is not None)
        return by_rows
    largest = fp8_amax(x) if largest is None else largest
    data, _, scale = kernels.cast_by_one_scale(view, largest, dtype, _SMALLEST, both=False)
    return data, scale


@operator(
    "spbench::fp8_cast_both",
    fake=lambda x, largest, *how: (*_room(x, False, *how), *_room(x, True, *how)),
)
def fp8_cast_both(
    x: Tensor, largest: Tensor | None, dtype: torch.dtype, tile: Sequence[int], scales: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x [r, c] and x^T [c, r] in eight bits, each followed by its scales, by one kernel."""
    data, scale = _cast(x, largest, dtype, tile, scales)
    return data, scale, *_cast(x.mT, largest, dtype, tile, scales)


@fp8_cast_both.register_kernel("cuda")
def _(
    x: Tensor, largest: Tensor | None, dtype: torch.dtype, tile: Sequence[int], scales: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = _kernels(x, tile, scales)
    if kernels is None or tuple(tile) != WHOLE:
        data, scale = fp8_cast(x, largest, dtype, tile, scales, False)
        return data, scale, *fp8_cast(x, largest, dtype, tile, scales, True)
    largest = fp8_amax(x) if largest is None else largest
    data, transposed, scale = kernels.cast_by_one_scale(x, largest, dtype, _SMALLEST, both=True)
    return data, scale, transposed, scale.clone()


@operator("spbench::fp8_transpose", fake=lambda data: data.new_empty(data.shape[1], data.shape[0]))
def fp8_transpose(data: Tensor) -> Tensor:
    """The contiguous transpose [c, r] of data [r, c] in eight bits."""
    return data.mT.contiguous()


@operator(
    "spbench::fp8_recast",
    fake=lambda data, scale, tile, scales: _room(data, True, data.dtype, tile, scales),
)
def fp8_recast(
    data: Tensor, scale: Tensor, tile: Sequence[int], scales: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Returns the transpose [c, r] of data [r, c], cast again (and so rounded again) in tiles of its own
    rows, and its scales."""
    return _cast(_counts_as(data, scale, tile, torch.float32).mT, None, data.dtype, tile, scales)


def _counts_as(data: Tensor, scale: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    exact = torch.promote_types(dtype, torch.float32)
    return data.to(exact) * _spread(scale, data.shape, tile).to(exact)


def _multiplied_as_they_are(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, tiles: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """The result of the GPU's eight-bit matmul, or None if it does not take these operands. It needs a scale
    for each row of a and column of b, or one for all, a contiguous summed dim, and multiples of 16."""
    takes: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {
        (*WHOLE, *WHOLE): ((), ()),
        (1, 0, 0, 1): ((a.shape[0], 1), (1, b.shape[1])),
    }
    shapes = takes.get(tuple(tiles))
    if shapes is None or dtype != torch.bfloat16 or of_a.dtype != torch.float32 or not a.numel():
        return None
    if a.shape[1] % 16 or b.shape[1] % 16 or not (a.is_contiguous() and b.mT.is_contiguous()):
        return None
    if not _multiplies_eight_bits():
        return None
    scales = (of_a.reshape(shapes[0]), of_b.reshape(shapes[1]))
    return torch._scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=True)


def _multiply(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, tiles: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return _counts_as(a, of_a, tiles[:2], dtype) @ _counts_as(b, of_b, tiles[2:], dtype)


def _products(prefix: str) -> tuple[object, object]:
    """The two matmuls of a library: fp8_mm returns its result, fp8_accumulate_mm_ adds it to a buffer."""

    @operator(f"spbench::{prefix}fp8_mm")
    def fp8_mm(
        a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, tiles: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return _multiply(a, b, of_a, of_b, tiles, dtype).to(dtype)

    @fp8_mm.register_kernel("cuda")
    def _(*arguments: Any) -> Tensor:
        result = _multiplied_as_they_are(*arguments)
        return _multiply(*arguments).to(arguments[-1]) if result is None else result

    @fp8_mm.register_fake
    def _(a: Tensor, b: Tensor, *others: Any) -> Tensor:
        return a.new_empty(a.shape[0], b.shape[1], dtype=others[-1])

    @operator(f"spbench::{prefix}fp8_accumulate_mm_", mutates_args={"into"})
    def fp8_accumulate_mm_(
        into: Tensor, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, tiles: Sequence[int]
    ) -> None:
        into.add_(_multiply(a, b, of_a, of_b, tiles, into.dtype))

    return fp8_mm, fp8_accumulate_mm_


_TORCH, _ENGINE = _products(""), _products("te_")


def multiply_fp8(a: Quantized, b: Quantized, dtype: torch.dtype, *, by_engine: bool) -> Tensor:
    """The matmul of a [m, k] and b [k, n] in ``dtype`` [m, n]; by TransformerEngine if ``by_engine``."""
    product = (_ENGINE if by_engine else _TORCH)[0]
    result: Tensor = product(a.data, b.data, a.scale, b.scale, [*a.tile, *b.tile], dtype)  # type: ignore[operator]
    return result


def accumulate_fp8(into: Tensor, a: Quantized, b: Quantized, *, by_engine: bool) -> None:
    """Add the matmul of a [m, k] and b [k, n] to ``into`` [m, n], in the precision of ``into``."""
    add = (_ENGINE if by_engine else _TORCH)[1]
    add(into, a.data, b.data, a.scale, b.scale, [*a.tile, *b.tile])  # type: ignore[operator]
