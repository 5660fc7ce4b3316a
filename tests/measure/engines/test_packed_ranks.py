"""Which ranks of packed sequences are traced: the fullest is among them."""

from __future__ import annotations

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.virtual import trace_classes


@pytest.mark.parametrize("strategy", ["lasp", "lasp2"])
def test_the_peak_is_that_of_the_rank_with_most_parts_of_documents(strategy: str) -> None:
    """A state begins anew in each, and is kept; the third of four ranks has most, the others few."""
    cell = Cell(
        model="tnl-tiny",
        strategy=strategy,
        sizes={"sp": 4},
        batch=1,
        seq_len=64,
        model_options={"layers": 1, "documents": [33, 1, 1, 1, 1, 27]},
    )
    peaks = [trace(cell, rank).memory.peak().nbytes for rank in range(4)]
    assert peaks.index(max(peaks)) == 2
    assert trace_classes(cell).measurement().peak_memory_bytes == peaks[2] > max(peaks[:2] + peaks[3:])
