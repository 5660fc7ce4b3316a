"""How a module of this folder offers a figure to scenarios: ``draw_NAME = Drawing("NAME", grid)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.grid import PanelGrid
from spbench.plots.paper import COLUMN_INCHES, PAGE_INCHES, save
from spbench.plots.series import Row

#: figures that would be higher in a column are drawn in the page's width alone
_PAGE_HEIGHT_INCHES = 9.5


@dataclass(frozen=True)
class Drawing:
    """Draws result rows into the files NAME.png, .svg and .pdf, as wide as a page, and, of figures that are
    not higher than a page then, NAME_column.png, .svg and .pdf.

    Attributes:
        name: of the figure and its files.
        grid: makes the panels of result rows (as in cells.jsonl) and the comparison table (of
            comparison.csv, may be empty).
    """

    name: str
    grid: Callable[[Sequence[Row], DataFrame], PanelGrid]

    def figure(self, rows: Sequence[Row], comparison: DataFrame, width_inches: float = PAGE_INCHES) -> Figure:
        """The figure in a width."""
        return self.grid(rows, comparison).draw(width_inches)

    def __call__(self, rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
        """Write the files into the folder ``output``, which is made if need be; returns their paths.

        The same rows and comparison give the same bytes.
        """
        return save_widths(self.grid(rows, comparison), output, self.name)


def save_widths(grid: PanelGrid, folder: Path, name: str) -> list[Path]:
    """Write a grid's files, as :class:`Drawing` says; returns their paths."""
    paths = save(grid.draw(PAGE_INCHES), folder, name)
    if grid.page_only:
        return paths
    column = grid.draw(COLUMN_INCHES)
    if column.get_figheight() <= _PAGE_HEIGHT_INCHES:
        paths += save(column, folder, f"{name}_column")
    return paths
