"""The Triton copy of packed weights: by Triton's interpreter on the CPU, and on a GPU."""

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from math import ceil

import pytest
import torch

from spbench.impls.kernels import packed_weights

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

#: rows and features; of more than a program's numbers and than a block of scales
SHAPE = (37, 640)


def difference(bits: int, device: str) -> float:
    """The largest difference from the plain copy, of the largest number."""
    generator = torch.Generator().manual_seed(0)
    rows, features = SHAPE
    words = torch.randint(-(2**15), 2**15, (rows, features * bits // 16), generator=generator)
    packed = words.to(torch.int16).view(torch.float16)
    blocks = ceil(rows * features / packed_weights.BLOCK)
    wide = torch.rand(rows if bits == 8 else ceil(blocks / 256), generator=generator) + 0.5
    narrow = torch.randint(0, 256, (0 if bits == 8 else blocks,), generator=generator).to(torch.uint8)
    scales = torch.cat((wide.view(torch.uint8), narrow))
    exact = packed_weights._unpacked(packed, scales, bits).double()
    if device == "cuda":
        ours = packed_weights.unpack_weight(packed.cuda(), scales.cuda(), bits).cpu()
    else:
        from spbench.impls.kernels import packed_weights_triton

        levels = packed_weights._levels(torch.device("cpu"))
        ours = packed_weights_triton.unpacked(packed, levels, wide, narrow, bits, 64, 256)
    return float((ours.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("bits", [4, 8])
def test_values(interpreter: ProcessPoolExecutor, bits: int) -> None:
    # a rounding of float16, where float32 and float64 fall on two sides
    assert interpreter.submit(difference, bits, "cpu").result() <= 2**-11


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
@pytest.mark.parametrize("bits", [4, 8])
def test_values_on_a_gpu(bits: int) -> None:
    assert difference(bits, "cuda") <= 2**-11
