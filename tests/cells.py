"""Short calls that make the cells of tests."""

from collections.abc import Mapping
from typing import Any

from spbench.bench.cell import Cell


def make_cell(
    model: str,
    strategy: str,
    sizes: Mapping[str, int],
    batch: int,
    seq_len: int,
    precision: str = "bf16",
    /,
    **fields: Any,
) -> Cell:
    """The cell with these settings; ``fields`` add further settings, or replace some of these."""
    settings = {"model": model, "strategy": strategy, "sizes": sizes, "batch": batch, "seq_len": seq_len}
    return Cell.model_validate(settings | {"precision": precision} | fields)
