"""Figures of values by number of GPUs: a row of panels for each value, a column for each model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from spbench.plots.lines import Value, draw_values, highest, without
from spbench.plots.panel import (
    gpu_axis,
    mark_handles,
    mark_missing,
    missing_notes,
    note_lines,
    notes_height_inches,
    value_axis,
    write_notes,
)
from spbench.plots.series import Row, by_model, gpu_counts, series_of, shared, title
from spbench.plots.style import PAGE_INCHES, add_legend, looks, new_figure

_PANEL_INCHES = 2.2


@dataclass(frozen=True)
class Quantity:
    """What a row of panels shows; ``name`` stands in the ids of its lines."""

    name: str
    axis_label: str
    value: Value


def scaling_figure(
    rows: Sequence[Row], quantities: Sequence[Quantity], otherwise: str, gpus_label: str = "Number of GPUs"
) -> Figure:
    """Draw the rows of each model.

    Args:
        otherwise: a title, where the rows name no scenario.
        gpus_label: what the sizes are.
    """
    models = by_model(rows)
    look = looks(row["cell"]["strategy"] for row in rows)
    lines = {name: series_of(models[name], look) for name in models}
    lost = {name: [(s, [r for r in s.rows if r["status"] != "ok"]) for s in lines[name]] for name in models}
    notes = note_lines([note for name in models for note in missing_notes(name, lost[name])], PAGE_INCHES)
    heights = [_PANEL_INCHES] * len(quantities) * bool(models)
    heights += [notes_height_inches(notes)] * bool(notes)
    figure = new_figure(PAGE_INCHES, sum(heights), title(rows, otherwise))
    if not models:
        return figure
    grid = figure.add_gridspec(len(heights), len(models), height_ratios=heights)
    handles: list[Artist] = []
    for index, quantity in enumerate(quantities):
        for column, name in enumerate(models):
            ax = figure.add_subplot(grid[index, column])
            handles += draw_values(ax, lines[name], look, quantity.value, quantity.name)
            missing = without(lines[name], quantity.value)
            gpu_axis(ax, gpu_counts(models[name]))
            value_axis(ax, highest(models[name], quantity.value), marks=any(some for _, some in missing))
            mark_missing(ax, missing, look)
            ax.set_xlabel(gpus_label if index == len(quantities) - 1 else "")
            ax.set_ylabel(quantity.axis_label if column == 0 else "")
            if index == 0:
                length = shared(models[name], "seq_len")
                ax.set_title(name + (f", sequence length {length}" if length else ""))
    if notes:
        write_notes(figure.add_subplot(grid[len(quantities), :]), notes)
    add_legend(
        figure, [*handles, *mark_handles([row for s in lost.values() for _, some in s for row in some])]
    )
    return figure
