"""Latency of a forward by number of GPUs and video: DSP (arXiv 2403.10266), inference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from spbench.plots.dsp_videos import videos_figure
from spbench.plots.line_panels import Quantity
from spbench.plots.lines import measured
from spbench.plots.series import Row
from spbench.plots.style import house_style, save

_LATENCY = Quantity("latency_s", "Latency of a forward (s)", measured("step_time_s"), logarithmic=True)


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw dsp_inference.png and dsp_inference.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl.
        comparison: the table of comparison.csv, which has what was published; may be empty.
    """
    with house_style():
        figure = videos_figure(rows, _LATENCY, comparison, "Latency by number of GPUs")
        return save(figure, output, "dsp_inference")
