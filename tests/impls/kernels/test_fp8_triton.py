"""The Triton casts to eight bits: by Triton's interpreter on the CPU, number for number as without."""

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from spbench.impls.kernels import fp8_casts
from spbench.impls.kernels.fp8_casts import E4M3, E5M2, WHOLE
from tests.impls.kernels.made import made

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ROWS = (1, 0)
#: more than a block, and no multiple of one
SHAPE = (70, 150)
CASES = [
    (tile, dtype, transposed, power_of_two)
    for tile, power_of_two in ((WHOLE, False), (ROWS, False), (ROWS, True))
    for dtype in (E4M3, E5M2)
    for transposed in (False, True)
]


def differences(
    tile: tuple[int, int], dtype: torch.dtype, transposed: bool, power_of_two: bool
) -> tuple[float, float, int]:
    """How much data and scales differ from the plain cast's, and how many numbers are not 0."""
    from spbench.impls.kernels import fp8_triton

    x = made(*SHAPE, seed=0, dtype=torch.bfloat16).detach() * torch.logspace(-3, 3, SHAPE[1]).bfloat16()
    x[3] = 0  # its scale is that of the smallest magnitude
    # a view whose rows are not adjacent
    view = x.mT.contiguous().mT if transposed else x
    data, scale = fp8_casts._cast(view, None, dtype, tile, torch.float32 if power_of_two else None)
    if tile == ROWS:
        ours, of_ours = fp8_triton.cast_by_rows(view, dtype, fp8_casts._SMALLEST, power_of_two)
    else:
        ours, other, of_ours = fp8_triton.cast_by_one_scale(
            view, view.abs().amax().float(), dtype, fp8_casts._SMALLEST, both=True
        )
        assert torch.equal(other.float(), ours.float().mT)
    exact, of_exact = data.double(), scale.double()
    return (
        float((ours.double() - exact).abs().max()),
        float((of_ours.double() - of_exact).abs().max()),
        int(exact.count_nonzero()),
    )


def test_casts_number_for_number(interpreter: ProcessPoolExecutor) -> None:
    for case in CASES:
        data, scale, numbers = interpreter.submit(differences, *case).result()
        assert (data, scale) == (0, 0), case
        assert numbers > SHAPE[0], case


has_eight_bits = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not has_eight_bits, reason="no GPU that multiplies eight bits")
@pytest.mark.parametrize(("tile", "dtype", "transposed", "power_of_two"), CASES)
def test_a_gpu_casts_and_multiplies_as_a_cpu(
    tile: tuple[int, int], dtype: torch.dtype, transposed: bool, power_of_two: bool
) -> None:
    scales = torch.float32 if power_of_two else None
    x, w = (torch.randn(256, 256, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (0, 1))
    x = x.mT.contiguous().mT if transposed else x

    def cast_and_multiplied(device: str) -> list[Tensor]:
        a, of_a = fp8_casts.fp8_cast(x.to(device), None, dtype, tile, scales, transposed)
        b, of_b = fp8_casts.fp8_cast(w.to(device), None, E4M3, tile, scales, False)
        left, right = (fp8_casts.Quantized(*each, tile) for each in ((a, of_a), (b, of_b)))
        y = fp8_casts.multiply_fp8(left, right.mT, torch.bfloat16, by_engine=False)
        both = fp8_casts.fp8_cast_both(x.to(device), None, dtype, tile, scales)
        return [each.cpu().double() for each in (a, of_a, b, of_b, *both, y)]

    *casts, y = cast_and_multiplied("cuda")
    *exact, product = cast_and_multiplied("cpu")
    for one, other in zip(casts, exact, strict=True):
        assert torch.equal(one, other)
    assert (y - product).abs().max() <= 2**-7 * product.abs().max()
