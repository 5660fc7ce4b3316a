"""The Triton kernels of masked softmax: their values by Triton's interpreter on the CPU."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from spbench.bench.measure.verify.judged import relative_errors
from spbench.impls.kernels import softmax
from tests.impls.kernels.made import made

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

SCALE = 0.3
#: B, Z, queries, keys
SHAPE = (2, 3, 7, 7)
#: rounding of results to the precision, and of sums in float32
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}


def _fill_new_tensors() -> None:
    """Have each new tensor be full of NaN."""
    torch.use_deterministic_algorithms(True)


def results(operator: str, dtype: torch.dtype, precision: torch.dtype, masked: bool, causal: bool) -> Tensor:
    """The probabilities, or the gradient of the scores, of values that dtype can hold."""
    from spbench.impls.kernels import softmax_triton

    by_kernel = dtype == precision
    scores, gradient = (made(*SHAPE, seed=seed, dtype=dtype).to(precision) for seed in (0, 1))
    scores = scores.transpose(1, 2).contiguous().transpose(1, 2)  # rows of a head are not adjacent
    hidden = torch.arange(SHAPE[3]).expand(SHAPE[0], 1, 1, -1) % 3 == 0
    mask = hidden if masked else None
    plain = softmax._in_steps(scores.double(), mask, SCALE, causal).to(precision)
    if operator == "forward":
        return (
            softmax_triton.masked_softmax(scores, mask, SCALE, causal, softmax.MASKED_SCORE)
            if by_kernel
            else plain
        )
    run = softmax_triton.masked_softmax_backward_ if by_kernel else softmax._gradient_in_steps
    run(gradient, plain.contiguous(), SCALE)
    return gradient


def error(operator: str, dtype: torch.dtype, masked: bool, causal: bool) -> float:
    exact, ours = (
        results(operator, dtype, precision, masked, causal) for precision in (torch.float64, dtype)
    )
    return relative_errors({"x": exact}, {"x": ours})["x"]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: whether kernels are interpreted is settled when Triton is imported."""
    with ProcessPoolExecutor(1, get_context("spawn"), _fill_new_tensors) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            process.submit(int).result()  # it starts now
        yield process


def test_values(interpreter: ProcessPoolExecutor) -> None:
    cases = [
        (operator, dtype, masked, causal)
        for operator in ("forward", "backward")
        for dtype in LIMITS
        for masked, causal in ((False, False), (True, False), (False, True))
    ]
    found = {case: interpreter.submit(error, *case) for case in cases}
    wrong = {case: task.result() for case, task in found.items() if not task.result() <= LIMITS[case[1]]}
    assert not wrong
