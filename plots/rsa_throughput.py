"""Throughput at the largest batch by number of GPUs: RSA (arXiv 2105.13120), Figures 3b and 7b."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pandas import DataFrame

from spbench.plots.axes import GPUS, Along
from spbench.plots.drawing import Drawing
from spbench.plots.grid import PanelGrid
from spbench.plots.lines import PlottedQuantity, line_grid, lines_by_setting, measured
from spbench.plots.series import Row, by_model, shared

THROUGHPUT = PlottedQuantity("throughput", "Tokens per second", measured("tokens_per_s"))


def scaling(
    rows: Sequence[Row],
    comparison: DataFrame,
    quantities: Sequence[PlottedQuantity],
    default_title: str,
    along: Along = GPUS,
) -> PanelGrid:
    """A column for each model, a row for each quantity, a line for each strategy and setting.

    Args:
        default_title: the title if the rows name no scenario.
    """
    facets = {}
    for name, some in by_model(rows).items():
        length = shared(some, "seq_len")
        facets[name + (f", sequence length {length}" if length else "")] = lines_by_setting(some)
    return line_grid(rows, facets, quantities, comparison, default_title, along)


draw = Drawing(
    __name__,
    partial(scaling, quantities=[THROUGHPUT], default_title="Throughput at the largest batch"),
)
