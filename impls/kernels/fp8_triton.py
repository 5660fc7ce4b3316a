"""The casts of :mod:`spbench.impls.kernels.fp8_casts` for GPUs, with a scale for each row or one for all.
Kernels read a matrix through its strides, so the same kernel casts a transposed view. Scales are computed in
float64 and divide in float32, as on a CPU.
"""

# arguments of kernels have no types before they are compiled
# mypy: allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

#: rows and columns of the block that one program casts
_ROWS, _COLUMNS = 32, 128


@triton.jit
def _scale(largest, limit, smallest, POWER_OF_TWO: tl.constexpr):
    scale = (tl.maximum(largest.to(tl.float64), smallest) / limit).to(tl.float32)
    if POWER_OF_TWO:
        scale = tl.exp2(tl.ceil(tl.log2(scale)))
    return scale


@triton.jit
def _in_eight_bits(x, scale, limit, to: tl.constexpr):
    divided = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return tl.minimum(tl.maximum(divided, -limit), limit).to(to)


@triton.jit
def _by_one_scale(
    x, largest, out, transposed, scales, rows, columns, s_row, s_column, limit, smallest,
    BOTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast a block of x [rows, columns] into ``out`` and, with BOTH, ``transposed`` [columns, rows]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    scale = _scale(tl.load(largest), limit, smallest, False)
    block = tl.load(x + row * s_row + column * s_column, mask=inside, other=0.0).to(tl.float32)
    data = _in_eight_bits(block, scale, limit, out.dtype.element_ty)
    tl.store(out + row * columns + column, data, mask=inside)
    if BOTH:
        tl.store(transposed + column.to(tl.int64) * rows + row, data, mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scales, scale)


@triton.jit
def _by_rows(
    x, out, scales, rows, columns, s_row, s_column, limit, smallest,
    POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast rows of x [rows, columns], each with its own scale; reads rows for the scales, then to cast."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (row < rows) & (column < columns)
        block = tl.load(x + row * s_row + column * s_column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(block))
    scale = _scale(tl.max(largest, 1), limit, smallest, POWER_OF_TWO)[:, None]
    for start in range(0, columns, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (row < rows) & (column < columns)
        block = tl.load(x + row * s_row + column * s_column, mask=inside, other=0.0).to(tl.float32)
        data = _in_eight_bits(block, scale, limit, out.dtype.element_ty)
        tl.store(out + row * columns + column, data, mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


def cast_by_one_scale(
    x: Tensor, largest: Tensor, dtype: torch.dtype, smallest: float, *, both: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x [r, c] in eight bits, x^T [c, r] if ``both`` (else empty), and the scale [1, 1]."""
    (r, c), empty = x.shape, torch.empty(0, device=x.device, dtype=dtype)
    data = torch.empty(r, c, device=x.device, dtype=dtype)
    transposed = torch.empty(c, r, device=x.device, dtype=dtype) if both else empty
    scale = torch.empty(1, 1, device=x.device)
    _by_one_scale[(triton.cdiv(r, _ROWS), triton.cdiv(c, _COLUMNS))](
        x, largest, data, transposed, scale, r, c, *x.stride(), torch.finfo(dtype).max, smallest,
        BOTH=both, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return data, transposed, scale


def cast_by_rows(x: Tensor, dtype: torch.dtype, smallest: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Returns x [r, c] in eight bits and the scale of each row [r, 1]."""
    r, c = x.shape
    data, scale = torch.empty(r, c, device=x.device, dtype=dtype), torch.empty(r, 1, device=x.device)
    rows = 8 if x.stride(1) == 1 else _ROWS  # columns of a transposed view lie side by side
    _by_rows[(triton.cdiv(r, rows),)](
        x, data, scale, r, c, *x.stride(), torch.finfo(dtype).max, smallest,
        POWER_OF_TWO=power_of_two, ROWS=rows, COLUMNS=512 if rows == 8 else _COLUMNS,
    )  # fmt: skip
    return data, scale
