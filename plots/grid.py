"""A figure as a grid of panels: rows and columns by facets, shared axes, notes and one legend.

A module of this folder offers a figure to scenarios as ``draw_NAME = Drawing("NAME", grid)``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory
from pandas import DataFrame

from spbench.plots import NothingToDraw
from spbench.plots.axes import Along, logarithmic_axis, status_mark, value_axis
from spbench.plots.direct_labels import can_be_labelled, label_lines
from spbench.plots.paper import COLUMN_INCHES, PAGE_INCHES, add_legend, house_style, new_figure, save
from spbench.plots.series import Row, grouped
from spbench.plots.style import GREY, shortened

#: the width in inches of a character of 7 points, and of 8 points
_NOTE_CHARACTER, _TITLE_CHARACTER = 0.0535, 0.064
_NOTE_INCHES, _TITLE_INCHES, _LABEL_INCHES = 0.125, 0.15, 0.36
_PANEL_INCHES, _COLUMN_PANEL_INCHES = 1.75, 1.4
#: figures that would be higher than this in a column are drawn only in the page's width
_PAGE_HEIGHT_INCHES = 9.5
#: panels share a linear axis only if the values of each panel fill this part of it
_LEAST_FILLED = 0.5


@dataclass
class Drawn:
    """The legend entries and values of a drawn panel, from which the grid makes the legend and the axes.

    Attributes:
        methods: legend entries of methods. Lines of a panel may be labelled in the panel instead.
        published: legend entries of published numbers.
        marks: legend entries of marks, for which the panel keeps a band below the values.
        values: values that the y axis must contain.
        places: the ticks of the x axis.
    """

    methods: Sequence[Artist] = ()
    published: Sequence[Artist] = ()
    marks: Sequence[Artist] = ()
    values: Sequence[float] = ()
    places: Sequence[int] = ()


@dataclass(frozen=True)
class Panel:
    """One panel of a grid.

    Attributes:
        draw: draws into the axes; called once for each size of the figure.
        title, x_label: left out if the panel above (title) or below (label) has the same.
        y_label: left out if the panel to the left has the same.
        along: draws the x axis from ``places``; None: ``draw`` draws the x axis.
        axis: "linear" or "log": the grid draws the y axis from ``values``; empty: ``draw`` does.
        scale: panels of one scale share the x axis, if they have ``along``, and the y axis, unless a panel
            would fill too little of it.
        inches: the height of the area within the axes; 0: the usual height in a figure of this width.
        width: the width relative to other panels of the row.
    """

    draw: Callable[[Axes], Drawn]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    along: Along | None = None
    axis: str = ""
    scale: Hashable = None
    inches: float = 0.0
    width: float = 1.0


@dataclass
class PanelGrid:
    """A figure that can be drawn in several widths.

    Attributes:
        notes: sentences below the panels.
        lost: rows without a number, whose status marks get legend entries.
        page_only: whether the figure is drawn only in the page's width, and not for a column.
    """

    title: str
    notes: Sequence[str] = ()
    lost: Sequence[Row] = ()
    page_only: bool = False
    _blocks: list[tuple[Sequence[Sequence[Panel]], int]] = field(default_factory=list)

    def add(self, facets: Sequence[Sequence[Panel]], abreast: int = 3) -> PanelGrid:
        """Add facets, each a column of panels, below earlier facets. The panels of a single facet stand in a
        row if there is room.

        Args:
            abreast: the number of facets side by side on a page; a column has fewer.
        """
        if facets and facets[0]:
            self._blocks.append((facets, abreast))
        return self

    def draw(self, width_inches: float = PAGE_INCHES) -> Figure:
        """The figure in this width; printed in this width, its smallest text has 7 points."""
        with house_style():
            lines = round(2 * PAGE_INCHES / width_inches)
            notes = [shortened(note, int(width_inches / _NOTE_CHARACTER), lines) for note in self.notes]
            blocks = [_rows(*block, width_inches) for block in self._blocks]
            heights = [[_row_inches(row, width_inches) for row in rows] for rows in blocks]
            parts = [sum(of) for of in heights]
            if notes:
                parts.append(_NOTE_INCHES * (1 + "\n".join(notes).count("\n")) + 0.05)
            figure = new_figure(width_inches, sum(parts), self.title)
            outer = figure.add_gridspec(len(parts), 1, height_ratios=parts) if parts else None
            places, wide = [], []
            for block, rows in enumerate(blocks):
                assert outer is not None
                grid = outer[block].subgridspec(
                    len(rows),
                    len(rows[0]),
                    height_ratios=heights[block],
                    width_ratios=[panel.width for panel in rows[0]],
                )
                for at, row in enumerate(rows):
                    for column, panel in enumerate(row):
                        ax = figure.add_subplot(grid[at, column])
                        heading = _title(row, column, width_inches)
                        if _spanned(row, column) > 1:
                            # written after the layout, which would make the panel as wide as its title
                            wide.append((ax, ax.set_title(" ", loc="left"), heading))
                        else:
                            ax.set_title(heading)
                        places.append(_Place(panel, ax, panel.draw(ax), (block, at, column)))
            _draw_axes(places)
            if notes and outer is not None:
                _write_notes(figure.add_subplot(outer[-1]), notes)
            self._name_all(figure, [place.drawn for place in places])
            figure.set_layout_engine("none")
            for ax, text, heading in wide:
                text.set_text(heading)
                # at the figure's left edge, because names of levels take a part of the panel's width
                edge = figure.transFigure.transform((0.01, 0))
                text.set_x(float(ax.transAxes.inverted().transform(edge)[0]))
        return figure

    def _name_all(self, figure: Figure, drawn: Sequence[Drawn]) -> None:
        """Lay the figure out, with names next to lines if all have room, else with a legend of names."""
        methods = [handle for of in drawn for handle in of.methods]
        others = [handle for of in drawn for handle in of.published]
        others += [handle for of in drawn for handle in of.marks]
        others += map(status_mark, dict.fromkeys(row["status"] for row in self.lost))
        lines = [handle for handle in methods if isinstance(handle, Line2D) and handle.axes is not None]
        if can_be_labelled(lines) and len(lines) == len(methods):
            add_legend(figure, others)
            figure.draw_without_rendering()
            if label_lines(figure, lines):
                return
        add_legend(figure, [*methods, *others])
        figure.draw_without_rendering()


@dataclass(frozen=True)
class Drawing:
    """A figure of result rows: the files NAME.png, .svg and .pdf, as wide as a page, and, unless a column's
    would be higher than a page, NAME_column.png, .svg and .pdf, as wide as a column.

    Attributes:
        name: the name of the figure and its files.
        grid: makes the panels from result rows (of cells.jsonl) and the comparison table (of comparison.csv,
            may be empty).
        of: the kind of rows that the figure needs, for the error if there are none.
    """

    name: str
    grid: Callable[[Sequence[Row], DataFrame], PanelGrid]
    of: str = ""

    def figure(self, rows: Sequence[Row], comparison: DataFrame, width_inches: float = PAGE_INCHES) -> Figure:
        """The figure of rows and comparison in a width."""
        return self.grid(rows, comparison).draw(width_inches)

    def __call__(self, rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
        """Write the files into the folder ``output``, which is made if need be; returns the files' paths.

        The same rows and comparison give the same bytes.

        Raises:
            NothingToDraw: no row has numbers that the figure shows; no file is written.
        """
        try:
            return save_widths(self.grid(rows, comparison), output, self.name)
        except NothingToDraw as error:
            raise NothingToDraw(f"{error}{f': {self.of}' if self.of else ''}") from None


def save_widths(grid: PanelGrid, folder: Path, name: str) -> list[Path]:
    """Write the files of a grid (see :class:`Drawing`); returns the files' paths. NothingToDraw if no panel
    has data."""
    page = grid.draw(PAGE_INCHES)
    if not any(map(_has_data, page.axes)):
        raise NothingToDraw("no cell here has what it shows")
    paths = save(page, folder, name)
    if grid.page_only:
        return paths
    column = grid.draw(COLUMN_INCHES)
    if column.get_figheight() <= _PAGE_HEIGHT_INCHES:
        paths += save(column, folder, f"{name}_column")
    return paths


def _has_data(ax: Axes) -> bool:
    """Whether a panel contains points, marks, bars or a map."""
    lines = any(np.size(line.get_xdata()) for line in ax.lines)
    return lines or bool(ax.patches or ax.collections or ax.images)


class _Place(NamedTuple):
    """A panel with its axes, the :class:`Drawn` of these, and its (block, row, column) in the figure."""

    panel: Panel
    ax: Axes
    drawn: Drawn
    at: tuple[int, int, int]


def _rows(facets: Sequence[Sequence[Panel]], abreast: int, width_inches: float) -> list[list[Panel]]:
    """The rows of panels of a block of facets that fits the figure's width."""
    most = max(1, int(abreast * width_inches / PAGE_INCHES))
    if len(facets) == 1 and most > 1:
        facets = [[panel] for panel in facets[0]]
    size = -(-len(facets) // -(-len(facets) // most))
    bands = [facets[at : at + size] for at in range(0, len(facets), size)]
    return [[panel for panel in row if panel] for band in bands for row in zip_longest(*band)]


def _row_inches(row: Sequence[Panel], width_inches: float) -> float:
    """The height in inches of a row of panels, with labels and titles."""
    usual = _PANEL_INCHES if width_inches >= PAGE_INCHES else _COLUMN_PANEL_INCHES
    lines = max(len(_title(row, column, width_inches).splitlines()) for column in range(len(row)))
    return max(panel.inches or usual for panel in row) + _LABEL_INCHES + _TITLE_INCHES * lines


def _spanned(row: Sequence[Panel], column: int) -> int:
    """The number of panels over which a panel's title may extend: itself and the next ones without title."""
    untitled = takewhile(lambda panel: not panel.title, row[column + 1 :])
    return 1 + len(list(untitled))


def _title(row: Sequence[Panel], column: int, width_inches: float) -> str:
    """The title of a panel, broken into lines that fit the panels over which the title may extend."""
    part = sum(panel.width for panel in row[column : column + _spanned(row, column)])
    inches = width_inches * part / sum(panel.width for panel in row) - 0.35
    return shortened(row[column].title, int(inches / _TITLE_CHARACTER), 3)


def _draw_axes(places: Sequence[_Place]) -> None:
    """Draw the axes that panels leave to the grid, and the labels that differ from a neighbour's."""
    at = {place.at: place for place in places}
    shared = _shared_scales(places)
    for place in places:
        panel, ax, (block, row, column) = place.panel, place.ax, place.at
        left, above, below = (at.get((block, row + y, column + x)) for x, y in ((-1, 0), (0, -1), (0, 1)))
        alike = [other for other in places if other is place or _one_y_axis(place, other, shared)]
        values = [value for other in alike for value in other.drawn.values]
        marks = any(other.drawn.marks for other in alike)
        if panel.axis == "log" and values:
            logarithmic_axis(ax, values, marks=marks)
        elif panel.axis:
            value_axis(ax, values, marks=marks)
        if panel.along is not None:
            beside = [other for other in places if other is place or _one_x_axis(place, other)]
            panel.along.draw_axis(ax, sorted({value for other in beside for value in other.drawn.places}))
        facet_goes_on = below is not None and below.panel.title == panel.title
        if below is None or below.panel.x_label != panel.x_label:
            ax.set_xlabel(panel.x_label)
        elif facet_goes_on or _one_x_axis(place, below):
            ax.tick_params(labelbottom=False)
        if above is not None and above.panel.title == panel.title:
            ax.set_title("")
        if left is None or left.panel.y_label != panel.y_label:
            ax.set_ylabel(panel.y_label)
        if left is not None and _one_y_axis(place, left, shared):
            ax.tick_params(labelleft=False)


def _shared_scales(places: Sequence[_Place]) -> set[Hashable]:
    """The scales whose panels share one y axis."""
    same: set[Hashable] = set()
    for scale, some in grouped(places, lambda place: place.panel.scale).items():
        tops = [max(place.drawn.values) for place in some if place.drawn.values]
        fill = some[0].panel.axis != "linear" or not tops or min(tops) >= _LEAST_FILLED * max(tops)
        if scale is not None and fill:
            same.add(scale)
    return same


def _one_y_axis(place: _Place, other: _Place, shared: set[Hashable]) -> bool:
    return place.panel.scale in shared and place.panel.scale == other.panel.scale


def _one_x_axis(place: _Place, other: _Place) -> bool:
    scales = (place.panel.scale, other.panel.scale)
    return place.panel.along is not None and place.panel.along == other.panel.along and None not in scales


def _write_notes(ax: Axes, notes: Sequence[str]) -> None:
    ax.set_axis_off()
    text = ax.text(0.01, 1, "\n".join(notes), fontsize=7, color=GREY, verticalalignment="top", gid="notes")
    # at the figure's left edge, wherever the panels above begin
    text.set_transform(blended_transform_factory(ax.figure.transFigure, ax.transAxes))
    text.set_in_layout(False)
