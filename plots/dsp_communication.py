"""What a GPU sends for a layer of ST-DiT by number of GPUs: DSP (arXiv 2403.10266), communication table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import GPUS
from spbench.plots.dsp_videos import video
from spbench.plots.sent_elements import sent_elements_figure
from spbench.plots.series import Row
from spbench.plots.style import house_style, save


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw dsp_communication.png and dsp_communication.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl.
        comparison: the table of comparison.csv, whose formulas speak of the rows; may be empty.
    """
    with house_style():
        return save(communication_figure(rows, comparison), output, "dsp_communication")


def communication_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A panel for each model and video, smaller ones first."""
    in_order = sorted(rows, key=lambda row: int(row["cell"]["seq_len"]))
    return sent_elements_figure(
        in_order, comparison, GPUS, lambda row: f"{row['cell']['model']}, {video(row)}"
    )
