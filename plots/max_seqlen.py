"""The largest sequence length that fits by number of GPUs: RSA (arXiv 2105.13120), Figures 5a, 5b and 9."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from spbench.plots.largest import Quantity, draw_largest
from spbench.plots.series import Row

QUANTITY = Quantity(
    figure="max_seqlen",
    title="Largest sequence length that fits",
    field="seq_len",
    axis_label="Sequence length (tokens)",
    unit="Tokens",
    fixed="batch",
    fixed_name="batch",
)


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw max_seqlen.png and max_seqlen.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, of searches for the sequence length.
        comparison: the table of comparison.csv; may be empty.
    """
    return draw_largest(rows, comparison, output, QUANTITY)
