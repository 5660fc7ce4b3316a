"""Losses with LASP beside one device's: LASP (arXiv 2404.02882), convergence table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from spbench.plots.convergence import convergence_figure
from spbench.plots.series import Row
from spbench.plots.style import house_style, save


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw lasp_convergence.png and lasp_convergence.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, whose measurement has ``losses``.
        comparison: the table of comparison.csv; may be empty.
    """
    with house_style():
        return save(convergence_figure(rows, comparison), output, "lasp_convergence")
