"""Beside torch's own MemTracker: pytest tests/benchmarks/test_memory_tracker.py --benchmark-only

The column of ratios says how long both take for the peak of one rank of the same step, on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from tests.benchmarks.test_engine_cost import cell
from tests.measure.engines.memory_tracker import tracked_peak


def peak(asked: Cell) -> int:
    return tracing.trace(asked).memory.peak().nbytes


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("tool", [peak, tracked_peak], ids=["spbench", "MemTracker"])
def test_peak(benchmark: Any, tool: Callable[[Cell], int], ranks: int) -> None:
    found = benchmark.pedantic(tool, (cell(ranks),), rounds=3, warmup_rounds=1)
    benchmark.extra_info["peak_bytes"] = found
    assert found == pytest.approx(peak(cell(ranks)), rel=1e-3)  # ours in granules of 512 bytes
