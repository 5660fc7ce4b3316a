"""Kernels of attention and of linear attention on a CPU: part of `pytest tests/benchmarks -m micro`.

Shapes are small, so that a call takes milliseconds: B = 1, Z = 4 heads, A = D = 64. What is measured is the
CPU time of one thread, which another process on the machine disturbs far less than it does the clock's.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward
from spbench.impls.kernels.linear_attention import (
    BLOCK,
    linear_attention_input_gradients,
    linear_attention_output,
    linear_attention_state_gradients,
    linear_attention_states,
)

pytestmark = pytest.mark.micro

HEADS, HEAD_SIZE = 4, 64
SCALE = HEAD_SIZE**-0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 10

Call = Callable[[], Any]


def random(count: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """``count`` tensors [1, Z, L, A], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, HEAD_SIZE)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def attention(length: int, dtype: torch.dtype, causal: bool) -> dict[str, Call]:
    """The forward and the backward kernel of softmax attention, each with its arguments."""
    q, k, v, d_o = random(4, length, dtype)
    o, lse = flash_attention(q, k, v, SCALE, causal)
    return {
        "forward": lambda: flash_attention(q, k, v, SCALE, causal),
        "backward": lambda: flash_attention_backward(d_o, q, k, v, o, lse, SCALE, causal),
    }


def linear(length: int, dtype: torch.dtype) -> dict[str, Call]:
    """The four operators of linear attention, each with its arguments."""
    q, k, v, d_o = random(4, length, dtype)
    decay = torch.linspace(0.001, 0.1, HEADS)
    states = linear_attention_states(k, v, decay, BLOCK)
    d_states = linear_attention_state_gradients(q, d_o, decay, BLOCK)
    initial = None
    return {
        "states": lambda: linear_attention_states(k, v, decay, BLOCK),
        "output": lambda: linear_attention_output(q, k, v, decay, states, initial, BLOCK),
        "state_gradients": lambda: linear_attention_state_gradients(q, d_o, decay, BLOCK),
        "input_gradients": lambda: linear_attention_input_gradients(
            q, k, v, d_o, decay, states, initial, d_states, None, BLOCK
        ),
    }


@pytest.mark.benchmark(group="attention kernels", timer=time.process_time)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_attention(benchmark: Any, kernel: str, dtype: str, causal: bool) -> None:
    call = attention(256, DTYPES[dtype], causal)[kernel]
    with torch.no_grad():
        found = benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=2)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.benchmark(group="linear attention kernels", timer=time.process_time)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["states", "output", "state_gradients", "input_gradients"])
def test_linear_attention(benchmark: Any, kernel: str, dtype: str) -> None:
    call = linear(512, DTYPES[dtype])[kernel]
    with torch.no_grad():
        found = benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=2)
    assert all(x.isfinite().all() for x in (found if isinstance(found, tuple) else [found]))
