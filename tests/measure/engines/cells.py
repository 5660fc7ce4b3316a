"""Cells of tiny models, and cards of a chosen size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import check_sizes
from spbench.impls.layout import Unsupported

AXES = {"tensor_parallel": "tp", "ring_self_attention": "sp"}


def cell_of(strategy: str, n: int, **changes: Any) -> Cell:
    sizes = {AXES[strategy]: n} if strategy in AXES else {}
    defaults = {"model": "bert-tiny", "strategy": strategy, "sizes": sizes, "batch": 3, "seq_len": 24}
    return Cell.model_validate(defaults | changes)


def supported(cell: Cell) -> bool:
    """Whether its strategy can run a cell."""
    try:
        check_sizes(cell)
    except Unsupported:
        return False
    return True


def write_cluster(folder: Path, mib: int) -> str:
    """A cluster of cards with that many usable MiB; returns its path."""
    unknown = "{value: null, source: made up}"
    path = folder / f"card-{mib}.yaml"
    path.write_text(
        f"""
about: for tests
device:
  name: card
  memory_total_bytes: {{value: {(mib + 10) * 2**20}, source: made up}}
  memory_context_bytes: {{value: {10 * 2**20}, source: made up}}
  memory_bandwidth_bytes_per_s: {unknown}
network:
  latency_s: {unknown}
  bandwidth_bytes_per_s: {unknown}
"""
    )
    return str(path)


def approximately(value: Any) -> Any:
    """As the value, but for what sums of many numbers are off by."""
    if isinstance(value, Mapping):
        return {name: approximately(each) for name, each in value.items()}
    if isinstance(value, list):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
