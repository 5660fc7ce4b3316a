"""Memory and throughput by sequence length and GPUs: LASP (arXiv 2404.02882), scalability figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from spbench.plots.length_scaling import length_scaling_figure
from spbench.plots.series import Row
from spbench.plots.style import house_style, save


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw lasp_scalability.png and lasp_scalability.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, of several lengths and numbers of GPUs.
        comparison: the table of comparison.csv, which has what was published; may be empty.
    """
    with house_style():
        figure = length_scaling_figure(rows, comparison, "Memory and throughput of LASP")
        return save(figure, output, "lasp_scalability")
