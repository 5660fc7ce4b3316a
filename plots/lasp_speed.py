"""Throughput by sequence length of each method: LASP (arXiv 2404.02882), speed figure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pandas import DataFrame

from spbench.plots.axes import LENGTHS
from spbench.plots.drawing import Drawing
from spbench.plots.grid import PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, line_grid, lines_of
from spbench.plots.series import Row, by_model, option, strategy

#: how a baseline computes linear attention -> its name; the strategies of LASP have a single way
_WAYS = {"left_product": "left product", "chunked": "right product"}
_ONE_WAY = ("lasp", "lasp2")


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each model, a line for each strategy and reading of the baselines."""
    facets = {
        name: lines_of(some, LENGTHS, partial(_reading, first_cluster=some[0]["cell"]["cluster"]))
        for name, some in by_model(rows).items()
    }
    return line_grid(rows, facets, [TOKENS_PER_SECOND], comparison, "Throughput by sequence length")


def _reading(row: Row, first_cluster: str) -> str:
    """How the row's strategy computes linear attention, and its cluster if it is not the first one."""
    way, cluster = str(option(row, "model_options", "linear_attention", "chunked")), row["cell"]["cluster"]
    found = [] if strategy(row) in _ONE_WAY else [_WAYS.get(way, way)]
    return ", ".join([*found, *([cluster] if cluster != first_cluster else [])])


draw = Drawing(__name__, _grid)
