"""Frozen weights in four or eight bits; forward and backward each make a copy in the dtype of the inputs
(QLoRA, arXiv 2305.14314; the weights of LLM.int8(), arXiv 2208.07339).

As with bitsandbytes' ``quant_storage`` of bfloat16, with which FSDP shards such weights, a packed parameter
has the model's dtype, and each element holds four or two codes in its first 16 bits. So strategies cut and
backends gather a packed parameter like any weight. Wider dtypes, for verification, have unused bits.

In four bits (NF4), 64 codes share a scale of eight bits, and 256 such scales share one of float32: 0.516
bytes a weight (functional.py of bitsandbytes 95f9af30, quantize_4bit with compress_statistics). The levels of
the eight-bit scales are linear here. In eight bits, each row has a scale. Scales are not sharded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from spbench.impls.kernels.operator import operator

#: the values of four-bit codes, quantiles of a normal distribution (QLoRA, appendix E)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
#: bits of an element that hold codes; codes that share a scale; scales that share a float32 scale
HOLDER, BLOCK, BLOCK_OF_SCALES = 16, 64, 256
#: the largest magnitude of a weight before weights are loaded
_INITIAL = 0.05
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Packed:
    """The format of a packed parameter.

    Attributes:
        bits: bits of a code, 4 or 8.
        scales: the scales, as a tensor of bytes.
    """

    bits: int
    scales: Tensor

    def unpacked(self, weight: Tensor) -> Tensor:
        """Returns the weight [..., H] in the dtype of the packed ``weight`` [..., H bits / 16]."""
        result: Tensor = unpack_weight(weight, self.scales, self.bits)
        return result


def _scales(scales: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """The float32 scales, which lie first so that they are aligned, and the one-byte scales of this number of
    blocks of four-bit codes."""
    wide = 4 * math.ceil(blocks / BLOCK_OF_SCALES)
    return scales[:wide].view(torch.float32), scales[wide:]


@operator(
    "spbench::unpack_weight",
    fake=lambda packed, scales, bits: packed.new_empty(*packed.shape[:-1], packed.shape[-1] * HOLDER // bits),
)
def unpack_weight(packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Returns the weight [..., H] from its packed elements [..., H bits / 16]."""
    size = packed.element_size()
    words = packed.contiguous().view(_INTEGERS[size]).long() >> (8 * size - HOLDER)
    codes = torch.stack([words >> at & (2**bits - 1) for at in range(0, HOLDER, bits)], -1).flatten(-2)
    if bits == 8:
        of_rows = scales.view(torch.float32).double().view(*codes.shape[:-1], 1)
        return ((codes - 256 * (codes > 127)) / 127 * of_rows).to(packed.dtype)
    blocks = math.ceil(codes.numel() / BLOCK)
    wide, narrow = _scales(scales, blocks)
    wide = wide.double().repeat_interleave(BLOCK_OF_SCALES)[:blocks]
    each = (narrow / 255 * wide).repeat_interleave(BLOCK)[: codes.numel()]
    values = torch.tensor(NF4, dtype=torch.float64, device=packed.device)[codes]
    return (values * each.view(codes.shape)).to(packed.dtype)


def _has_kernel(packed: Tensor, scales: Tensor, bits: int) -> bool:
    return packed.element_size() == 2 and find_spec("triton") is not None


@unpack_weight.register_kernel("cuda", _has_kernel)
def _(packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    wide = scales.view(torch.float32) if bits == 8 else None
    if wide is None:
        wide, scales = _scales(scales, math.ceil(packed.numel() * (HOLDER // bits) / BLOCK))
    kernels = import_module("spbench.impls.kernels.packed_weights_triton")
    levels = _levels(packed.device)
    result: Tensor = kernels.unpacked(packed, levels, wide, scales, bits, BLOCK, BLOCK_OF_SCALES)
    return result


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4, dtype=torch.float32, device=device)


def initial_scales(shape: torch.Size, bits: int) -> Tensor:
    """The initial scales of a packed weight of this (unpacked) shape, as a tensor of bytes."""
    if bits == 8:
        return torch.full((shape[:-1].numel(),), _INITIAL, dtype=torch.float32).view(torch.uint8)
    blocks = math.ceil(shape.numel() / BLOCK)
    wide = torch.full((math.ceil(blocks / BLOCK_OF_SCALES),), _INITIAL, dtype=torch.float32)
    return torch.cat((wide.view(torch.uint8), torch.full((blocks,), 255, dtype=torch.uint8)))


def pack_weights(modules: Iterator[nn.Module], bits: int) -> None:
    """Replace the matrices of modules by packed parameters without values, and add their scales.

    Raises:
        ValueError: the features of a row do not fill a whole number of packed elements.
    """
    for module in modules:
        for name, weight in [*module._parameters.items()]:
            if weight is None or weight.ndim < 2 or name == "bias":  # a grouped bias has two dims
                continue
            *rows, features = weight.shape
            if features * bits % HOLDER:
                few = f"{features} features of a rank are no multiple of {HOLDER // bits}"
                raise ValueError(f"{few}, to be packed; use fewer ranks, or frozen_bits: {HOLDER}")
            packed = nn.Parameter(weight.new_empty(*rows, features * bits // HOLDER), requires_grad=False)
            vars(packed).update(vars(weight))
            module._parameters[name] = packed
            module.register_buffer(f"scales_{name}", initial_scales(weight.shape, bits), persistent=False)
            module.packed_bits = bits  # type: ignore[assignment]


def mark_packed(module: nn.Module) -> None:
    """Record on each packed weight of a module its :class:`Packed`. Callers do this before each forward,
    because backends that gather weights replace the tensors."""
    for each in module.modules():
        if not (bits := vars(each).get("packed_bits")):
            continue
        for name, weight in (*each._parameters.items(), *vars(each).items()):
            if (scales := each._buffers.get(f"scales_{name}")) is not None:
                weight.spbench_packed = Packed(bits, scales)


def scales_in(module: nn.Module) -> list[Tensor]:
    """The scales of all packed weights of a module."""
    return [b for name, b in module.named_buffers() if name.rpartition(".")[2].startswith("scales_")]


def packed_of(weight: Tensor) -> Packed | None:
    """The format of a packed weight; None: the weight is not packed."""
    return getattr(weight, "spbench_packed", None)
