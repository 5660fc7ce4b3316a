"""What the engine itself costs: pytest tests/benchmarks --benchmark-only

Compare within one run: the column of ratios that pytest-benchmark prints beside each time.
"""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.memory.allocator import replay


def cell(ranks: int) -> Cell:
    return Cell(
        model="bert-base",
        strategy="ring_self_attention",
        sizes=Sizes(sp=ranks),
        batch=8,
        seq_len=1024,
        precision="fp16",
        cluster="piz-daint-p100",
        model_options={"layers": 4},
    )


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("events", [False, True], ids=["memory", "memory and time"])
@pytest.mark.parametrize("path", ["remembered", "plain"])
def test_trace(benchmark: Any, monkeypatch: pytest.MonkeyPatch, path: str, events: bool, ranks: int) -> None:
    """A trace in a process that has traced such a cell before, with operators remembered and without."""
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1" if path == "plain" else "")
    trace = benchmark.pedantic(tracing.trace, (cell(ranks),), {"events": events}, rounds=3, warmup_rounds=1)
    assert trace.memory.peak().nbytes > 0


def test_replay_of_the_allocator(benchmark: Any) -> None:
    log = tracing.trace(cell(64)).memory
    assert benchmark(replay, log.sizes, log.events, None).out_of_memory is None
