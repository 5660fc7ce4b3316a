"""Operators a second on fake tensors: pytest tests/benchmarks/test_dispatch.py --benchmark-only

``extra_info`` has operators_per_s: with FakeTensorMode alone, with the plain recorder, and with the recorder
that remembers.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.measure.trace.recorder import FastRecorder, Recorder

#: of one round of :func:`operators`
OPERATORS = 6
ROUNDS = 200


def operators(x: Tensor, weight: Tensor) -> None:
    """A matmul, a view, and operators with new results and in place."""
    y = torch.mm(x, weight)
    z = torch.relu(y).view(4, -1, weight.shape[1])
    z.add_(1).mul_(2)
    z.sum()


def alone(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    return nullcontext()


def plain(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    return in_a_step(Recorder())


def remembering(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    return in_a_step(FastRecorder(mode))


@contextmanager
def in_a_step(recorder: Recorder) -> Iterator[None]:
    with recorder, recorder.phase("forward"):
        yield


@pytest.mark.micro
@pytest.mark.benchmark(group="operators on fake tensors", timer=time.process_time)
@pytest.mark.parametrize("watched", [alone, plain, remembering])
def test_operators(benchmark: Any, watched: Callable[[FakeTensorMode], AbstractContextManager[Any]]) -> None:
    mode = FakeTensorMode()
    with mode, watched(mode), torch.no_grad():
        x, weight = torch.empty(64, 128), torch.empty(128, 256)

        def many() -> None:
            for _ in range(ROUNDS):
                operators(x, weight)

        benchmark.pedantic(many, rounds=5, warmup_rounds=1)
    benchmark.extra_info["operators_per_s"] = round(ROUNDS * OPERATORS / benchmark.stats["median"])
