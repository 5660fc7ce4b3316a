"""The page of every figure: a grid of panels, then notes and claims below it, then one legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpecFromSubplotSpec, SubplotSpec
from matplotlib.transforms import blended_transform_factory

from spbench.plots.claims import DrawnClaim, claim_handles, draw_claims, height_inches
from spbench.plots.panel import mark_handles
from spbench.plots.series import Row
from spbench.plots.style import GREY, PAGE_INCHES, add_legend, new_figure, shortened

_NOTE_INCHES = 0.13


class Page:
    """A figure under construction.

    Args:
        heights: of the rows of panels, in inches.
        columns: into which the rows of panels are divided.
        notes: sentences below the panels; each gets two lines at most.
        claims: drawn in a panel of their own.
    """

    def __init__(
        self,
        title: str,
        heights: Sequence[float],
        columns: int = 1,
        notes: Sequence[str] = (),
        claims: Sequence[DrawnClaim] = (),
        width_inches: float = PAGE_INCHES,
    ):
        self._notes = [
            line for note in notes for line in shortened(note, int(19 * width_inches), 2).splitlines()
        ]
        self._claims = claims
        parts = [sum(heights)] * bool(heights)
        parts += [_NOTE_INCHES * len(self._notes) + 0.05] * bool(notes)
        parts += [height_inches(claims)] * bool(claims)
        self.figure = new_figure(width_inches, sum(parts), title)
        self._parts: Iterator[SubplotSpec] = iter(())
        if parts:
            outer = self.figure.add_gridspec(len(parts), 1, height_ratios=parts)
            self._parts = (outer[row] for row in range(len(parts)))
        if heights:
            # a grid of their own, as labels of the claims would narrow the panels of the same columns
            self._grid = next(self._parts).subgridspec(len(heights), columns, height_ratios=heights)

    def panel(self, row: int, column: int | None = None) -> Axes:
        """A new panel in a row and column of the grid; without a column it is as wide as the page."""
        return self.figure.add_subplot(self._grid[row, slice(None) if column is None else column])

    def divided(self, row: int, rows: int, columns: int, **ratios: Any) -> GridSpecFromSubplotSpec:
        """A row of the grid divided into a grid of its own; ``ratios`` as for matplotlib's subgridspec."""
        return self._grid[row, :].subgridspec(rows, columns, **ratios)

    def finish(self, handles: Sequence[Artist], lost: Sequence[Row] = ()) -> Figure:
        """Draw notes, claims and the legend; returns the figure.

        Args:
            handles: legend entries; those of one label become one entry.
            lost: rows without a number, whose status marks get entries too.
        """
        if self._notes:
            self._write_notes(self.figure.add_subplot(next(self._parts)))
        if self._claims:
            draw_claims(self.figure.add_subplot(next(self._parts)), self._claims)
        add_legend(self.figure, [*handles, *mark_handles(lost), *claim_handles(self._claims)])
        return self.figure

    def _write_notes(self, ax: Axes) -> None:
        ax.set_axis_off()
        text = ax.text(0.01, 1, "\n".join(self._notes), fontsize=6.5, color=GREY, verticalalignment="top")
        # at the figure's left edge, wherever the panels above begin
        text.set_transform(blended_transform_factory(self.figure.transFigure, ax.transAxes))
        text.set_gid("notes")
        text.set_in_layout(False)
