"""What a GPU sends for a layer of linear attention by sequence length: LASP (arXiv 2404.02882), Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import LENGTHS
from spbench.plots.sent_elements import sent_elements_figure
from spbench.plots.series import Row, gpus
from spbench.plots.style import house_style, save


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw lasp_communication.png and lasp_communication.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl.
        comparison: the table of comparison.csv, whose formulas speak of the rows; may be empty.
    """
    with house_style():
        return save(communication_figure(rows, comparison), output, "lasp_communication")


def communication_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A panel for each model and number of GPUs."""
    return sent_elements_figure(
        rows, comparison, LENGTHS, lambda row: f"{row['cell']['model']}, {gpus(row)} GPUs"
    )
