"""Triton's interpreter, for all tests of its kernels."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch


def _interpret() -> None:
    """Make a process interpret kernels as a GPU runs them, each new tensor full of NaN.

    Triton 3.9's interpreter multiplies the bits of bfloat16 operands, rounds to bfloat16 towards zero, and to
    eight bits without a carry.
    """
    torch.use_deterministic_algorithms(True)
    import triton.language as tl
    from triton.runtime import interpreter

    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    narrow = {
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.int8, np.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.int8, np.uint8),
    }

    def to_nearest(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in narrow:
            return convert(x, source, target, rounding)
        dtype, bits, unsigned = narrow[target]
        values = torch.from_numpy(np.ascontiguousarray(x, np.float32).reshape(-1))
        return values.to(dtype).view(bits).numpy().view(unsigned).reshape(x.shape)

    interpreter.InterpreterBuilder.create_dot = dot_of_values
    interpreter._convert_float = to_nearest


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: whether kernels are interpreted is settled when Triton is imported."""
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            process.submit(int).result()  # it starts now
        yield process
