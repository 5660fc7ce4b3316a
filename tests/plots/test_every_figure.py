"""What holds of the figure of every packaged scenario, drawn of a row for each of its cells and of the
committed published numbers."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.plots import FIGURES
from spbench.plots.grid import Drawing
from spbench.plots.paper import COLUMN_INCHES, PAGE_INCHES
from spbench.plots.style import GREY, method_color, short_name, strategy_name, tint
from tests.grid import data
from tests.plots.rows import assert_nothing_overlaps, row_of
from tests.slow import slow

Row = dict[str, Any]
REPRODUCTION = Path(__file__).parents[2] / "results" / "reproduction"
WITHOUT_UNIT = data(__file__)["WITHOUT_UNIT"]
GIB = 2**30
#: lines of these are numbers of GPUs, or backends, and bars of these are mesh axes or placements
NO_METHODS = ("lasp_scalability", "lasp2_scalability", "lasp_convergence", "placement_imbalance")
SCENARIOS = {
    path.stem: found.group(1)
    for path in sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))
    if (found := re.search(r"^figure: *(\w+)", path.read_text(), re.MULTILINE))
}


@cache
def rows_of(scenario: str) -> list[Row]:
    """Rows that are like those of a run: of each cell, longer times and more memory for longer sequences."""
    rows = []
    for number, cell in enumerate(Narrowing().declared(load_scenario(scenario))):
        length, ranks = cell.seq_len or 512, max(1, len(cell.strategy))
        sent = [
            {"axis": "sp", "phase": phase, "sent_bytes": float(length * ranks * GIB // 1024)}
            for phase in ("forward", "backward")
        ]
        measurement = {
            "peak_memory_bytes": (4 + number % 7) * GIB,
            "usable_memory_bytes": 12 * GIB,
            "imbalance": 1.0 + number % 4,
            "expert_imbalance": 1.0 + number % 4,
            "step_time_s": 1.5 + number % 5,
            "tokens_per_s": 1000.0 * (1 + number % 9) * length / 512,
            "samples_per_s": 1.0 + number % 9,
            "answer": 1024 * (1 + number % 11),
            "communication": sent,
            "formula": sent,
            "losses": [{"step": step, "mlm": 7 / step, "language": 6 / step} for step in range(1, 20)],
        }
        lost = number % 10 == 9
        rows.append(row_of(cell, {} if lost else measurement, "oom" if lost else "ok"))
    return rows


@cache
def committed() -> pd.DataFrame:
    frames = [pd.read_csv(path) for path in sorted(REPRODUCTION.glob("*.csv"))]
    return pd.concat([frame for frame in frames if {"scenario", "published", "table"} <= {*frame}])


def comparison_of(scenario: str) -> pd.DataFrame:
    """The committed comparison of a scenario, as in its comparison.csv."""
    known = committed()
    some = known[known["scenario"] == scenario].reset_index(drop=True)
    return some.assign(claim=some["table"], numerator=some["cell"], denominator="")


def drawing_of(name: str) -> Drawing:
    draw = FIGURES.load(name)
    assert isinstance(draw, Drawing)
    assert draw.name == name
    return draw


@pytest.mark.one_in(5)
@pytest.mark.parametrize("width", [COLUMN_INCHES, slow(PAGE_INCHES)])
@pytest.mark.parametrize(("scenario", "name"), SCENARIOS.items())
def test_every_figure(scenario: str, name: str, width: float) -> None:
    """Something is drawn; texts are readable; axes say what they show; published numbers are in it; a
    method has its colour."""
    rows, comparison = rows_of(scenario), comparison_of(scenario)
    grid = drawing_of(name).grid(rows, comparison)
    figure = grid.draw(PAGE_INCHES if grid.page_only else width)
    assert figure.axes
    assert_nothing_overlaps(figure)
    assert any(ax.lines or ax.patches for ax in figure.axes)
    assert_axes_are_named(figure)
    assert_published(figure, comparison)
    if name not in NO_METHODS:
        shown = colors(figure, {row["cell"]["strategy"] for row in rows})
        assert shown
        for strategy, some in shown.items():
            expected = {tint(method_color(strategy), strength) for strength in (1, 0.6, 0.35, 0.25)}
            assert some <= expected, strategy


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("scenario", "name"), SCENARIOS.items())
def test_every_figure_of_one_row_which_may_be_lost_and_of_none(scenario: str, name: str) -> None:
    rows = rows_of(scenario)
    for few in (rows[-1:], rows[9:10], []):
        assert_nothing_overlaps(drawing_of(name).figure(few, comparison_of(scenario)))


def assert_axes_are_named(figure: Figure) -> None:
    """The figure says what is along its axes, with the units of what has one."""
    names = {name for ax in figure.axes for name in (ax.get_xlabel(), ax.get_ylabel()) if name}
    assert names
    for name in names:
        assert "(" in name or any(word in name.lower() for word in WITHOUT_UNIT), name


def assert_published(figure: Figure, comparison: pd.DataFrame) -> None:
    """The published numbers of each quantity that has lines of ours are in it, and no others."""
    lines = [line for ax in figure.axes for line in ax.lines]
    for quantity, some in comparison.dropna(subset="published").groupby("quantity"):
        numbers = {float(f"{number:.6g}") for number in some["published"]}
        ours, published = (
            [line for line in lines if str(line.get_gid()).startswith(f"{side} {quantity} ")]
            for side in ("ours", "published")
        )
        shown = {float(f"{y:.6g}") for line in published for y in np.asarray(line.get_ydata(), dtype=float)}
        assert shown <= numbers
        # of formulas the exact ones replace those of papers
        assert shown == numbers or not ours or quantity == "sent_elements"


def colors(figure: Figure, strategies: set[str]) -> dict[str, set[str]]:
    """The colours of the lines, markers and bars of each strategy, found by its name in their ids."""
    found: dict[str, set[str]] = {}
    names = {name(strategy): strategy for strategy in strategies for name in (strategy_name, short_name)}
    for artist in (artist for ax in figure.axes for artist in ax.get_children()):
        gid = str(artist.get_gid())
        ends = r"( on \d+ ranks)?(, .*| \d+ (virtual|distributed))?$"
        name = max((n for n in names if re.search(f" {re.escape(n)}{ends}", gid)), key=len, default=None)
        if name is None or gid.startswith(("formula", "sent ", "published oom")):
            continue
        if isinstance(artist, Line2D) and artist.get_markeredgecolor() != GREY:
            found.setdefault(names[name], set()).add(to_hex(artist.get_markeredgecolor()))
        elif isinstance(artist, Rectangle):
            found.setdefault(names[name], set()).add(to_hex(artist.get_facecolor()))
    return found
