"""Quantities by number of GPUs, a panel for each model."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import GPUS, Along
from spbench.plots.line_panels import line_panels
from spbench.plots.lines import Line, PlottedQuantity, lines_of
from spbench.plots.series import Row, by_model, differing_settings, shared, strategy
from spbench.plots.style import Look, looks


def scaling_figure(
    rows: Sequence[Row],
    comparison: DataFrame,
    quantities: Sequence[PlottedQuantity],
    default_title: str,
    along: Along = GPUS,
) -> Figure:
    """A column for each model, a row for each quantity, a line for each strategy and setting.

    Args:
        default_title: the title if the rows name no scenario.
    """
    look = looks(map(strategy, rows))
    panels = {}
    for name, some in by_model(rows).items():
        length = shared(some, "seq_len")
        panels[name + (f", sequence length {length}" if length else "")] = strategy_lines(some, look, along)
    return line_panels(rows, panels, quantities, comparison, default_title, along)


def strategy_lines(
    rows: Sequence[Row], look: dict[str, Look], along: Along = GPUS, ignored: Sequence[str] = ()
) -> list[Line]:
    """A line for each strategy, and for each setting in which rows of one strategy and GPU count differ.

    Args:
        ignored: settings that do not distinguish lines.
    """
    return list(lines_of(rows, look, along, differing_settings(rows, ignored)))
