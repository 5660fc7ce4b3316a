"""The largest batch that fits by number of GPUs: RSA (arXiv 2105.13120), Figures 3a and 7a."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from spbench.plots.largest import Quantity, draw_largest
from spbench.plots.series import Row

QUANTITY = Quantity(
    figure="max_batch",
    title="Largest batch that fits",
    field="batch",
    axis_label="Batch (sequences)",
    unit="Sequences",
    fixed="seq_len",
    fixed_name="sequence length",
)


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw max_batch.png and max_batch.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, of searches for the batch.
        comparison: the table of comparison.csv; may be empty.
    """
    return draw_largest(rows, comparison, output, QUANTITY)
