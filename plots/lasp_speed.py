"""Throughput by sequence length of each method: LASP (arXiv 2404.02882), speed figure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import LENGTHS
from spbench.plots.drawing import Drawing
from spbench.plots.line_panels import line_panels
from spbench.plots.lines import PlottedQuantity, lines_of, measured
from spbench.plots.series import Row, by_model, option, strategy
from spbench.plots.style import looks

_THROUGHPUT = PlottedQuantity(
    "throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s"), logarithmic=True
)

#: how a baseline computes linear attention -> its name; the strategies of LASP have a single way
_WAYS = {"left_product": "left product", "chunked": "right product"}
_ONE_WAY = ("lasp", "lasp2")


def _figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A panel for each model, a line for each strategy and reading of the baselines."""
    look = looks(map(strategy, rows))
    panels = {}
    for name, some in by_model(rows).items():
        reading = partial(_reading, first_cluster=some[0]["cell"]["cluster"])
        panels[name] = list(lines_of(some, look, LENGTHS, reading))
    return line_panels(rows, panels, [_THROUGHPUT], comparison, "Throughput by sequence length")


def _reading(row: Row, first_cluster: str) -> str:
    """How the row's strategy computes linear attention, and its cluster if it is not the first one."""
    way, cluster = str(option(row, "model_options", "linear_attention", "chunked")), row["cell"]["cluster"]
    found = [] if strategy(row) in _ONE_WAY else [_WAYS.get(way, way)]
    return ", ".join([*found, *([cluster] if cluster != first_cluster else [])])


draw = Drawing(__name__, _figure)
