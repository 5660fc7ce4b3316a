"""What holds of the figure of every packaged scenario, drawn of a row for each of its cells and of the
committed published numbers. What all figures share: the looks of strategies, and the panel of claims. The
grid of panels: shared axes, labels that stand once, and names beside lines.
"""

import re
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.impls.registries import all_strategies
from spbench.impls.strategies.nesting import all_pairs
from spbench.plots import FIGURES
from spbench.plots.axes import GPUS, LENGTHS, logarithmic_axis
from spbench.plots.claims import claims_of, claims_panel
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.paper import COLUMN_INCHES, PAGE_INCHES
from spbench.plots.style import (
    GREY,
    category_colors,
    contrast,
    looks,
    method_color,
    short_name,
    strategy_name,
    tick_texts,
    tint,
)
from tests.grid import data
from tests.plots.rows import assert_nothing_overlaps, compared, labels, legend, row_of, table
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


def test_a_strategy_looks_the_same_whichever_others_are_drawn() -> None:
    names = [*all_strategies(), "a_plug_in", "another"]
    everywhere = looks(names)
    assert list(looks(reversed(names))) == list(everywhere)
    for one, other in combinations(names, 2):
        pair = looks([one, other])
        assert pair == {name: everywhere[name] for name in pair}
        assert pair[one].color != pair[other].color


@pytest.mark.parametrize(
    ("published", "ours", "error"),
    [(1e9, 1e9, "+0.0%"), (1e9, 1e9 + 4, "+4e-07%"), (1.0, 0.9996, "-4e-02%"), (2.0, 2.1, "+5.0%")],
)
def test_a_claim_that_is_nearly_met_does_not_read_as_met(published: float, ours: float, error: str) -> None:
    # ten digits in both columns must not lie on each other either
    claims = claims_of(table(compared("near", published, ours, "a row")))
    figure = PanelGrid("Claims").add(claims_panel(claims)).draw()
    assert_nothing_overlaps(figure)
    (ax,) = figure.axes
    assert error in [text.get_text() for text in ax.texts]


def test_strategies_around_each_other_have_the_hatch_of_the_inner_and_the_marker_of_the_outer_one() -> None:
    found = looks(["megatron_sp+ring_self_attention", "ring_self_attention", "megatron_sp"])
    composed = found["megatron_sp+ring_self_attention"]
    assert composed.color not in (found["ring_self_attention"].color, found["megatron_sp"].color)
    assert (composed.marker, composed.hatch) == (
        found["megatron_sp"].marker,
        found["ring_self_attention"].hatch,
    )
    assert looks(["megatron_sp+ring_self_attention"]) == {"megatron_sp+ring_self_attention": composed}
    assert strategy_name("megatron_sp+ring_self_attention") == "Megatron-SP + RSA"
    assert strategy_name("ring_self_attention") == "Ring Self-Attention"


#: how linear RGB is seen by normal eyes, and without green, red and blue cones: Machado, Oliveira and
#: Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency, 2009, severity 1
SEEN = data(__file__)["SEEN"]


def lab(color: str, seen: str = "normal") -> Any:
    """A colour in CIELAB (D65), as it is seen."""
    srgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    by = np.array(SEEN[seen].split(), dtype=float).reshape(3, 3)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(to_xyz @ np.clip(by @ linear, 0, 1) / np.array([0.9505, 1, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
def test_methods_are_told_apart_with_any_eyes_and_in_grey(seen: str) -> None:
    known = looks(all_strategies())
    for (one, a), (other, b) in combinations(known.items(), 2):
        distance = np.linalg.norm(lab(a.color, seen) - lab(b.color, seen))
        assert distance > 15, f"{one} and {other} look alike"
        assert a.marker != b.marker
        assert a.hatch != b.hatch
    assert min(contrast(look.color) for look in known.values()) >= 3


def test_what_is_not_in_the_table_has_a_colour_of_its_own() -> None:
    known = {method_color(name) for name in all_strategies()}
    others = [pair.name for pair in all_pairs()] + [f"plug_in_{n}" for n in range(200)]
    found = {name: method_color(name) for name in others}
    assert len(set(found.values())) == len(others)
    for color in found.values():
        assert color not in known
        assert contrast(color) >= 3
        assert min(np.linalg.norm(lab(color) - lab(other)) for other in known) > 8
    # the same in every session and beside any others
    assert method_color("ulysses+ring_attention") == "#531cf6"


@pytest.mark.parametrize(("values", "ticks"), [((10**1.08, 13.0), [10.0]), ((50.0, 10**1.92), [100.0])])
def test_a_tick_on_the_edge_of_a_logarithmic_axis_is_there(
    values: tuple[float, float], ticks: list[float]
) -> None:
    ax = Figure().subplots()
    logarithmic_axis(ax, values, marks=False)
    assert {*ticks} <= {*ax.get_yticks()}


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
    """The second line lies so near to the others that its name has no room between them."""
    steep = [8, 256, 16384]
    times = {"first": 8, "the second one": 4, "third": 1}
    near = {name: [n * y for y in steep] for name, n in times.items()} | {"flat": [8, 8, 8]}
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
