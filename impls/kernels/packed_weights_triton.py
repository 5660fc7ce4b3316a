"""The unpacking of :mod:`spbench.impls.kernels.packed_weights` for GPUs: a program reads codes, multiplies
their values with scales in float32, and writes each element once.
"""

# arguments of kernels have no types before they are compiled
# mypy: allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

#: elements that one program writes
_NUMBERS = 1024


@triton.jit
def _unpack(
    words, levels, wide, scales, out, count, features,
    BITS: tl.constexpr, BLOCK: tl.constexpr, OF_SCALES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Write NUMBERS elements to ``out``; ``wide`` has float32 scales of rows, or of OF_SCALES byte scales."""
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < count
    each: tl.constexpr = 16 // BITS
    word = tl.load(words + at // each, mask=inside, other=0).to(tl.int32)
    code = (word >> ((at % each) * BITS).to(tl.int32)) & (2**BITS - 1)
    if BITS == 8:
        value = (code - 256 * (code > 127).to(tl.int32)).to(tl.float32) / 127
        value *= tl.load(wide + at // features, mask=inside, other=0.0)
    else:
        block = at // BLOCK
        scale = tl.load(scales + block, mask=inside, other=0).to(tl.float32) / 255
        scale *= tl.load(wide + block // OF_SCALES, mask=inside, other=0.0)
        value = tl.load(levels + code, mask=inside, other=0.0) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def unpacked(
    packed: Tensor, levels: Tensor, wide: Tensor, scales: Tensor, bits: int, block: int, of_scales: int
) -> Tensor:
    """The weight [..., H] from packed elements [..., H bits / 16] of half precision. ``levels`` [16] are the
    values of four-bit codes, ``wide`` the float32 scales and ``scales`` the one-byte scales."""
    features = packed.shape[-1] * 16 // bits
    out = torch.empty(*packed.shape[:-1], features, dtype=packed.dtype, device=packed.device)
    _unpack[(triton.cdiv(out.numel(), _NUMBERS),)](
        packed.contiguous().view(torch.int16), levels, wide, scales, out, out.numel(), features,
        BITS=bits, BLOCK=block, OF_SCALES=of_scales, NUMBERS=_NUMBERS,
    )  # fmt: skip
    return out
