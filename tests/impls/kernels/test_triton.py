"""The Triton kernels: their values by Triton's interpreter on the CPU, their types by its compiler.
The Triton copy of packed weights: by Triton's interpreter on the CPU, and on a GPU.
The Triton casts to eight bits: by Triton's interpreter on the CPU, number for number as without."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.bench.measure.verify.judged import relative_errors
from spbench.impls.kernels import fp8_casts, packed_weights, softmax
from spbench.impls.kernels import linear_attention as plain
from spbench.impls.kernels.fp8_casts import E4M3, E5M2, WHOLE
from tests.impls.kernels.made import made

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

B, Z = 1, 2
#: bytes of shared memory that a program may have on an A100, the smallest card the kernels are meant for
SHARED_BYTES = 163 * 1024


@dataclass(frozen=True)
class Case:
    length: int
    d: int
    a: int
    block: int
    decay: tuple[float, float] | None
    passed: bool  # whether there is a state before the first position, and a gradient after the last


CASES = {
    "ragged": Case(100, 16, 24, 80, (0.0, 0.1), True),
    "tiles of a block, strong decay": Case(140, 16, 16, 256, (0.02, 20.0), True),
    "tiles of a head, no decay": Case(40, 72, 144, 64, None, False),
    "one position": Case(1, 4, 4, 256, (0.5, 1000.0), True),
    "blocks of one": Case(3, 4, 6, 1, (0.5, 0.0), False),
}


def _among_nans(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Rows of a larger tensor that is NaN elsewhere, as the heads of a fused projection lie."""
    batch, heads, length, width = shape
    room = torch.full((batch, length + 3, heads, width + 5), torch.nan, dtype=dtype)
    x = room[:, :length, :, :width].transpose(1, 2)
    return x.copy_(made(*shape, seed=seed, dtype=dtype).detach())


def _all_results(operators: Any, case: Case, dtype: torch.dtype, precision: torch.dtype) -> dict[str, Tensor]:
    """What the four operators make of inputs of values that dtype can hold, computed in a precision."""
    rows = {"q": case.d, "k": case.d, "v": case.a, "d_o": case.a}
    q, k, v, d_o = (
        _among_nans(B, Z, case.length, width, seed=seed, dtype=dtype).to(precision)
        for seed, width in enumerate(rows.values())
    )
    initial = d_final = None
    if case.passed:
        state = plain.state_dtype(precision)
        initial, d_final = (made(B, Z, case.d, case.a, seed=seed, dtype=state).detach() for seed in (5, 6))
    decay = None if case.decay is None else torch.tensor(case.decay)
    states = operators["states"](k, v, decay, case.block)
    o = operators["output"](q, k, v, decay, states, initial, case.block)
    d_states = operators["state_gradients"](q, d_o, decay, case.block)
    d_q, d_k, d_v = operators["input_gradients"](
        q, k, v, d_o, decay, states, initial, d_states, d_final, case.block
    )
    return {"states": states, "o": o, "d_states": d_states, "d_q": d_q, "d_k": d_k, "d_v": d_v}


OPERATORS = ("states", "output", "state_gradients", "input_gradients")


def errors(name: str, dtype: torch.dtype) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the interpreted kernels and of the plain operators, against plain ones in float64."""
    from spbench.impls.kernels import linear_attention_triton

    kernels = {operator: getattr(linear_attention_triton, operator) for operator in OPERATORS}
    plainly = {operator: getattr(plain, f"plain_{operator}") for operator in OPERATORS}
    exact = _all_results(plainly, CASES[name], dtype, torch.float64)
    theirs = _all_results(plainly, CASES[name], dtype, dtype)
    ours = _all_results(kernels, CASES[name], dtype, dtype)
    assert {n: (x.shape, x.dtype, x.stride()) for n, x in ours.items()} == {
        n: (x.shape, x.dtype, x.stride()) for n, x in theirs.items()
    }
    return relative_errors(exact, ours), relative_errors(exact, theirs)


#: the precision in which each case is of every run
ALWAYS = {
    "ragged": torch.bfloat16,
    "tiles of a block, strong decay": torch.float16,
    "tiles of a head, no decay": torch.bfloat16,
    "one position": torch.float32,
    "blocks of one": torch.float32,
}


def in_precisions() -> Iterator[Any]:
    for name, dtype in itertools.product(CASES, (torch.float32, torch.float16, torch.bfloat16)):
        marks = [] if dtype is ALWAYS[name] else pytest.mark.slow
        yield pytest.param(name, dtype, id=f"{name}-{dtype}", marks=marks)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "dtype"), [*in_precisions()])
def test_kernels_are_the_plain_operators(
    name: str, dtype: torch.dtype, interpreter: ProcessPoolExecutor
) -> None:
    ours, theirs = interpreter.submit(errors, name, dtype).result()
    for tensor, error in ours.items():
        # a sum of products may be rounded once more (to bfloat16) on its way to the next product
        assert error < 2 * theirs[tensor] + 1e-7, tensor


# -- masked softmax -------------------------------------------------------------------------------------

SCALE = 0.3
#: B, Z, queries, keys
SHAPE = (2, 3, 7, 7)
#: rounding of results to the precision, and of sums in float32
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}


def softmax_results(
    operator: str, dtype: torch.dtype, precision: torch.dtype, masked: bool, causal: bool
) -> Tensor:
    """The probabilities, or the gradient of the scores, of values that dtype can hold."""
    from spbench.impls.kernels import softmax_triton

    by_kernel = dtype == precision
    scores, gradient = (made(*SHAPE, seed=seed, dtype=dtype).detach().to(precision) for seed in (0, 1))
    scores = scores.transpose(1, 2).contiguous().transpose(1, 2)  # rows of a head are not adjacent
    hidden = torch.arange(SHAPE[3]).expand(SHAPE[0], 1, 1, -1) % 3 == 0
    mask = hidden if masked else None
    plain = softmax._masked_softmax.kernel(scores.double(), mask, SCALE, causal).to(precision)
    if operator == "forward":
        return (
            softmax_triton.masked_softmax(scores, mask, SCALE, causal, softmax.MASKED_SCORE)
            if by_kernel
            else plain
        )
    run = softmax_triton.masked_softmax_backward_ if by_kernel else softmax._masked_softmax_backward_.kernel
    run(gradient, plain.contiguous(), SCALE)
    return gradient


def softmax_error(operator: str, dtype: torch.dtype, masked: bool, causal: bool) -> float:
    exact, ours = (
        softmax_results(operator, dtype, precision, masked, causal) for precision in (torch.float64, dtype)
    )
    return relative_errors({"x": exact}, {"x": ours})["x"]


def test_masked_softmax_is_that_of_its_steps(interpreter: ProcessPoolExecutor) -> None:
    cases = [
        (operator, dtype, masked, causal)
        for operator in ("forward", "backward")
        for dtype in LIMITS
        for masked, causal in ((False, False), (True, False), (False, True))
    ]
    found = {case: interpreter.submit(softmax_error, *case) for case in cases}
    wrong = {case: task.result() for case, task in found.items() if not task.result() <= LIMITS[case[1]]}
    assert not wrong


# -- types: the interpreter accepts kernels that the compiler does not ------------------------------------

POINTERS = {"x", "y", "w", "out"}
STATES = {"states", "passed", "rates"}
COMPILED = [
    # kernel, precision, columns of the widest tile in TILE, whether seen from the end, arguments that are 1
    ("_boundaries", torch.bfloat16, 1, False, ()),
    ("_boundaries", torch.float16, 1, True, ("heads", "count")),
    ("_scan", torch.float32, 1, False, ("length", "count")),
    ("_scan", torch.float32, 1, True, ()),
    ("_positions", torch.bfloat16, 2, True, ()),
    ("_positions", torch.float16, 2, False, ()),
    ("_positions", torch.float32, 2, True, ("length", "heads", "count", "tiles")),
]


def shared_bytes(kernel: str, dtype: torch.dtype, columns: int, backward: bool, ones: tuple[str, ...]) -> int:
    """Compile a kernel for an A100, which needs none, at head size 128; its bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    from spbench.impls.kernels import linear_attention_triton as kernels

    function = getattr(kernels, kernel)
    settings = kernels._settings(torch.empty(1, 128, dtype=dtype), 128, columns)
    warps = settings.pop("num_warps")
    known = {
        **settings,
        "BACKWARD": backward,
        "SIZE": 128 * 128,
        "TS": kernels.SCANNED,
        **dict.fromkeys(ones, 1),
    }
    if ones:  # without a decay, and without a state before the first position
        known |= {"rates": None, "passed": None}
    known["state_column"] = 1
    held = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]

    def type_of(name: str) -> str:
        if name in known:
            return "constexpr"
        return held if name in POINTERS else "*fp32" if name in STATES else "i32"

    names = function.arg_names
    source = triton.compiler.ASTSource(
        function,
        {name: type_of(name) for name in names},
        {(i,): known[name] for i, name in enumerate(names) if name in known},
        {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if n in POINTERS | STATES and n not in known
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": warps})
    return compiled.metadata.shared


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", COMPILED, ids=[f"{x[0]}-{x[1]}-{'backward' if x[3] else 'forward'}" for x in COMPILED]
)
def test_kernels_compile_and_fit(arguments: tuple[Any, ...], compiler: ProcessPoolExecutor) -> None:
    assert compiler.submit(shared_bytes, *arguments).result() <= SHARED_BYTES


#: rows and features; of more than a program's numbers and than a block of scales
SHAPE_PACKED = (37, 640)


def difference(bits: int, device: str) -> float:
    """The largest difference from the plain copy, of the largest number."""
    generator = torch.Generator().manual_seed(0)
    rows, features = SHAPE_PACKED
    words = torch.randint(-(2**15), 2**15, (rows, features * bits // 16), generator=generator)
    packed = words.to(torch.int16).view(torch.float16)
    blocks = ceil(rows * features / packed_weights.BLOCK)
    wide = torch.rand(rows if bits == 8 else ceil(blocks / 256), generator=generator) + 0.5
    narrow = torch.randint(0, 256, (0 if bits == 8 else blocks,), generator=generator).to(torch.uint8)
    scales = torch.cat((wide.view(torch.uint8), narrow))
    exact = packed_weights.unpack_weight.kernel(packed, scales, bits).double()
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


ROWS = (1, 0)
#: more than a block, and no multiple of one
SHAPE_FP8 = (70, 150)
CASES_FP8 = [
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

    x = (
        made(*SHAPE_FP8, seed=0, dtype=torch.bfloat16).detach()
        * torch.logspace(-3, 3, SHAPE_FP8[1]).bfloat16()
    )
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
    for case in CASES_FP8:
        data, scale, numbers = interpreter.submit(differences, *case).result()
        assert (data, scale) == (0, 0), case
        assert numbers > SHAPE_FP8[0], case


has_eight_bits = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not has_eight_bits, reason="no GPU that multiplies eight bits")
@pytest.mark.parametrize(("tile", "dtype", "transposed", "power_of_two"), CASES_FP8)
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
