"""The grid of panels: shared axes, labels that stand once, and names beside lines."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spbench.plots.axes import GPUS, LENGTHS
from spbench.plots.grid import Drawn, Panel, PanelGrid
from spbench.plots.paper import COLUMN_INCHES
from spbench.plots.style import category_colors, tick_texts
from tests.plots.drawn import assert_nothing_overlaps, labels, legend

LINES = {"rising": [1, 2, 4, 8], "falling": [9, 7, 5, 3], "flat": [6, 6, 6, 6]}


def panel(title: str, lines: dict[str, list[int]], scale: str | None = "one", axis: str = "linear") -> Panel:
    """Lines over 2, 4, 8 ... GPUs."""

    def draw(ax: Axes) -> Drawn:
        places = [2 ** (n + 1) for n in range(max(map(len, lines.values())))]
        colors = category_colors(lines)
        drawn = [
            ax.plot(places[: len(y)], y, marker="o", color=colors[name], label=name)[0]
            for name, y in lines.items()
        ]
        return Drawn(drawn, values=[value for y in lines.values() for value in y], places=places)

    return Panel(draw, title, "GPUs", "things", GPUS, axis, scale)


def shown(ax: Axes) -> tuple[list[str], list[str]]:
    """The tick labels that are seen, along and upwards."""
    along, up = (
        [tick.label1.get_text() for tick in axis.get_major_ticks() if tick.label1.get_visible()]
        for axis in (ax.xaxis, ax.yaxis)
    )
    return along, up


def test_panels_of_one_scale_share_axes_and_their_labels() -> None:
    twice = {name: [2 * value for value in values[:3]] for name, values in LINES.items()}
    first, second = PanelGrid("shared").add([[panel("a", LINES)], [panel("b", twice)]]).draw().axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xlim() == second.get_xlim()
    assert (first.get_ylabel(), second.get_ylabel()) == ("things", "")
    assert shown(first)[1]
    assert not shown(second)[1]
    assert shown(second)[0] == ["2", "4", "8", "16"]


def test_a_panel_that_would_fill_little_of_the_axis_has_its_own() -> None:
    tenfold = {name: [10 * value for value in values] for name, values in LINES.items()}
    first, second = PanelGrid("own").add([[panel("a", LINES)], [panel("b", tenfold)]]).draw().axes
    assert second.get_ylim()[1] > 5 * first.get_ylim()[1]
    assert shown(second)[1]


def test_in_a_column_panels_stand_below_each_other() -> None:
    grid = PanelGrid("narrow").add([[panel("a", LINES)], [panel("b", LINES)]])
    upper, lower = grid.draw(COLUMN_INCHES).axes
    assert upper.get_position().x0 == pytest.approx(lower.get_position().x0)
    assert upper.get_position().y0 > lower.get_position().y1
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "GPUs")
    assert not shown(upper)[0]


def boxes(figure: Figure) -> list[tuple[float, float, float, float]]:
    """What names beside lines cover, in pixels."""
    return [label.get_window_extent().extents for label in labels(figure)]


@pytest.mark.parametrize("inches", [COLUMN_INCHES, 7.0])
def test_names_beside_lines_lie_over_no_line_and_over_no_other_name(inches: float) -> None:
    figure = PanelGrid("named").add([[panel("a", LINES)]]).draw(inches)
    assert [label.get_text() for label in labels(figure)] == list(LINES)
    assert not figure.legends
    assert_nothing_overlaps(figure)
    for one, other in combinations(boxes(figure), 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    (ax,) = figure.axes
    for line, label in zip(ax.lines, labels(figure), strict=True):
        x0, y0, x1, y1 = label.get_window_extent().extents
        own = np.inf
        for other in ax.lines:
            ends = other.get_transform().transform(other.get_xydata())
            path = np.concatenate([np.linspace(a, b, 200) for a, b in pairwise(ends)])
            gaps = np.hypot(
                np.clip(np.maximum(x0 - path[:, 0], path[:, 0] - x1), 0, None),
                np.clip(np.maximum(y0 - path[:, 1], path[:, 1] - y1), 0, None),
            )
            assert gaps.min() > 0
            own = gaps.min() if other is line else own
        assert own == min(own, 10 * figure.dpi / 72)  # a reader sees to which line the name belongs


def test_where_names_have_no_room_there_is_a_legend() -> None:
    alike = {name: [n, n, n, n] for n, name in enumerate(("one", "two", "three"), 100)}
    figure = PanelGrid("alike").add([[panel("a", alike)]]).draw()
    assert not labels(figure)
    assert legend(figure) == list(alike)


def test_names_stand_to_the_right_of_lines_where_there_is_no_room_beside_them() -> None:
    """The first line lies so near to the others that its name has no room within them."""
    near = {
        name: [100 * n * r for r in (1, 10, 100)] for n, name in ((1, "a ring"), (1.4, "scores"), (4, "a"))
    }
    figure = PanelGrid("near").add([[panel("a", near, axis="log")]]).draw(7.0)
    assert {label.get_text() for label in labels(figure)} == {*near}
    assert not figure.legends
    assert_nothing_overlaps(figure)


def test_ticks_are_short_and_regular() -> None:
    assert tick_texts([1000, 10_000, 1e6, 2.5e9]) == ["1k", "10k", "1M", "2.5G"]
    assert tick_texts([1e-9, 1e-8]) == ["1e-9", "1e-8"]
    assert tick_texts([0, 2500, 50_000]) == ["0", "2,500", "50,000"]

    def draw(ax: Axes) -> Drawn:
        return Drawn(values=[1], places=[2048 << n for n in range(12)])

    ax = PanelGrid("lengths").add([[Panel(draw, along=LENGTHS, axis="linear")]]).draw(COLUMN_INCHES).axes[0]
    assert [text for text in shown(ax)[0] if text] == ["2K", "8K", "32K", "128K", "512K", "2048K"]
