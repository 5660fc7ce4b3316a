"""Throughput by sequence length of each method: LASP (arXiv 2404.02882), speed figure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import LENGTHS
from spbench.plots.line_panels import Quantity, line_panels, lines_of
from spbench.plots.lines import measured
from spbench.plots.series import Row, by_model
from spbench.plots.style import house_style, looks, save

_THROUGHPUT = Quantity(
    "throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s"), logarithmic=True
)

#: how a baseline computes linear attention -> its name; LASP has but one way
_WAYS = {"left_product": "left product", "chunked": "right product"}
_ONE_WAY = ("lasp", "lasp2")


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw lasp_speed.png and lasp_speed.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, of several lengths and strategies.
        comparison: the table of comparison.csv, which has what was published; may be empty.
    """
    with house_style():
        return save(speed_figure(rows, comparison), output, "lasp_speed")


def speed_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A panel for each model, a line for each strategy and reading of the baselines."""
    look = looks(row["cell"]["strategy"] for row in rows)
    panels = {}
    for model, some in by_model(rows).items():
        cluster = some[0]["cell"]["cluster"]
        panels[model] = list(lines_of(some, look, LENGTHS, partial(_reading, cluster=cluster)))
    return line_panels(rows, panels, [_THROUGHPUT], comparison, "Throughput by sequence length")


def _reading(row: Row, cluster: str) -> str:
    """What of a row others of its strategy may have otherwise; nothing for LASP on the first cluster."""
    cell = row["cell"]
    way = str((cell.get("model_options") or {}).get("linear_attention", "chunked"))
    found = [] if cell["strategy"] in _ONE_WAY else [_WAYS.get(way, way)]
    return ", ".join([*found, *([cell["cluster"]] if cell["cluster"] != cluster else [])])
