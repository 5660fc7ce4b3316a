"""How a module of this folder offers its figure to scenarios: ``draw = Drawing(__name__, figure)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.series import Row
from spbench.plots.style import DPI, house_style


@dataclass(frozen=True)
class Drawing:
    """Draws result rows into the files NAME.png and NAME.svg, NAME being the module's name.

    Attributes:
        module: the ``__name__`` of the figure's module.
        figure: makes the figure of result rows (as in cells.jsonl) and the comparison table (of
            comparison.csv, may be empty); called in the house style.
    """

    module: str
    figure: Callable[[Sequence[Row], DataFrame], Figure]

    def __call__(self, rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
        """Write both files into the folder ``output``, which is made if need be; returns their paths.

        The same rows and comparison give the same bytes.
        """
        output.mkdir(parents=True, exist_ok=True)
        name = self.module.rpartition(".")[2]
        png, svg = output / f"{name}.png", output / f"{name}.svg"
        with house_style():
            figure = self.figure(rows, comparison)
            figure.savefig(png, dpi=DPI, metadata={"Software": None})
            figure.savefig(svg, metadata={"Date": None})
        return [png, svg]
