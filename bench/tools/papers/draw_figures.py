"""Drawing the figures of a scenario's rows, and of a paper's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spbench.bench.command_line.progress import message
from spbench.bench.measure import RanScenario, Scenario, with_band
from spbench.bench.tools.papers.comparison import Comparison, as_frame
from spbench.impls import told
from spbench.plots import FIGURES, NothingToDraw

if TYPE_CHECKING:
    from pandas import DataFrame


def draw_figure(
    scenario: Scenario, ran: RanScenario, comparisons: Sequence[Comparison], folder: Path
) -> tuple[list[Path], bool]:
    """Draw the scenario's figure; returns its files, and whether drawing failed."""
    figure = scenario.document.figure
    if figure is None or not ran.known:
        return [], False
    return draw(figure, [with_band(row) for row in ran.known.values()], as_frame(comparisons), folder)


def draw(
    figure: str, rows: Sequence[Mapping[str, Any]], comparison: DataFrame, folder: Path
) -> tuple[list[Path], bool]:
    """Draw a figure; returns its files (none if there is no such figure), and whether drawing failed."""
    if figure not in FIGURES:
        return [], False
    try:
        return [Path(path) for path in FIGURES.load(figure)(rows, comparison, folder)], False
    except NothingToDraw as error:
        message(f"spbench: the figure {figure} was not drawn: {error}; the results are kept")
    except (Exception, SystemExit) as error:
        message(f"spbench: the figure {figure} could not be drawn: {told(error)}; the results are kept")
    return [], True
