"""Throughput at the largest batch by number of GPUs: RSA (arXiv 2105.13120), Figures 3b and 7b."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from spbench.plots.lines import measured
from spbench.plots.scaling import Quantity, scaling_figure
from spbench.plots.series import Row
from spbench.plots.style import house_style, save

THROUGHPUT = Quantity("throughput", "Tokens per second", measured("tokens_per_s"))


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw rsa_throughput.png and rsa_throughput.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, of timed searches for the batch.
        comparison: not used, as the paper's figures have no numbers.
    """
    with house_style():
        figure = scaling_figure(rows, [THROUGHPUT], "Throughput at the largest batch")
        return save(figure, output, "rsa_throughput")
