"""The largest batch and its throughput by pipeline stages: RSA (arXiv 2105.13120), Figures 4 and 8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from spbench.plots.lines import measured
from spbench.plots.rsa_throughput import THROUGHPUT
from spbench.plots.scaling import Quantity, scaling_figure
from spbench.plots.series import Row
from spbench.plots.style import house_style, save

BATCH = Quantity("batch", "Largest batch (sequences)", measured("answer"))


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw rsa_pipeline.png and rsa_pipeline.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, of timed searches for the batch.
        comparison: not used, as the paper's figures have no numbers.
    """
    with house_style():
        figure = scaling_figure(
            rows, [BATCH, THROUGHPUT], "Largest batch by pipeline stages", "Number of GPUs, 4 a stage"
        )
        return save(figure, output, "rsa_pipeline")
