"""Our numbers against measurements of real machines: memory and time by source, and published step times."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from pandas import DataFrame, Series

from spbench.plots.axes import logarithmic_axis, marker_line, set_error_ticks, set_ticks, ticks_between
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.series import Row
from spbench.plots.style import GREY, INK, category_colors, tick_texts

#: the quantities of the comparison that are drawn, with the labels of their axes
_QUANTITIES = {
    "peak_memory_gib": "Peak memory (GiB)",
    "allocated_memory_gib": "Memory after a step (GiB)",
    "reserved_memory_gib": "Reserved memory (GiB)",
    "step_time_ms": "Step time (ms)",
}
#: for the role of a number: (marker, whether it is filled, name in the legend)
_ROLES = {
    "predicted": ("o", True, "predicted"),
    "inferred": ("o", False, "a setting was inferred from it"),
    "calibrated": ("s", False, "calibrated on it"),
}
#: the error within which the figure of published step times is shaded
_NEAR = 0.10


def _grid(_: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each quantity: above, our numbers over measured ones; below, the relative errors."""
    numbers = comparison.dropna(subset=["published", "reproduced"])
    numbers = numbers.assign(source=numbers["table"].str.partition(": ")[0])
    colors = category_colors(numbers["source"])
    facets = []
    for quantity, name in _QUANTITIES.items():
        some = numbers[numbers["quantity"] == quantity]
        if len(some):
            draw_ours, draw_errors = (
                partial(draw, some=some, colors=colors) for draw in (_draw_values, _draw_errors)
            )
            upper = Panel(draw_ours, name, "Measured", "Ours")
            facets.append([upper, Panel(draw_errors, name, "Measured", "Ours / measured - 1")])
    title = "Measured on real machines, beside ours"
    return PanelGrid(title, _missing_notes(comparison, numbers)).add(facets, abreast=4)


def _missing_notes(comparison: DataFrame, numbers: DataFrame) -> list[str]:
    missing = len(comparison) - len(numbers)
    return [f"{missing} measured numbers have no number of ours and are not drawn"] if missing else []


@cache
def titles() -> dict[str, str]:
    """The titles of tables of measurements, by table, from results/field/titles.csv."""
    text = files("spbench.results.field").joinpath("titles.csv").read_text(encoding="utf-8")
    return {line["table"]: line["title"] for line in csv.DictReader(text.splitlines())}


def _table_name(table: str) -> str:
    return titles().get(table, table.replace("-", " "))


def _time_text(ms: float) -> str:
    """The text of a time in ms on an axis: "20 ms", "1.5 s"."""
    return f"{ms:.4g} ms" if ms < 1e3 else f"{ms / 1e3:,g} s"


def _field_grid(_: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each published table, and for each scenario's claims: our times over published times."""
    numbers = comparison.dropna(subset=["published", "reproduced"])
    numbers = numbers.assign(source=field_sources(numbers))
    panels = []
    for source, some in numbers.groupby("source", sort=False):
        mean = some["relative_error"].abs().mean()
        name = f"{_table_name(str(source))}: {mean:.1%}"
        panels.append(Panel(partial(_draw_times, some=some), name, "Published time", "Our time"))
    notes = [f"Shaded: ours within {_NEAR:.0%} of the published time. Beside each name: the mean error."]
    title = "Step times that others published, beside ours"
    return PanelGrid(title, [*notes, *_missing_notes(comparison, numbers)]).add(
        [[panel] for panel in panels], abreast=3
    )


def field_sources(numbers: DataFrame) -> Series[str]:
    """The name of each number's panel: its published table, or the scenario of a claim."""
    claims = numbers["scenario"].str.replace("_", "-")
    return numbers["table"].str.partition(": ")[0].where(numbers["status_published"] != "", claims)


def _draw_times(ax: Axes, some: DataFrame) -> Drawn:
    low, high, ticks = logarithmic_ticks([*some["published"], *some["reproduced"]])
    ends = np.array([low, high])
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        ax.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
        set_ticks(axis, ticks, list(map(_time_text, ticks)))
        axis.set_minor_locator(NullLocator())
    ax.fill_between(ends, ends * (1 - _NEAR), ends * (1 + _NEAR), color=GREY, alpha=0.25, linewidth=0)
    ax.plot(ends, ends, color=GREY, linewidth=0.8, zorder=1)
    drawn = _points(ax, some, "reproduced", dict.fromkeys(some["source"], INK))
    return Drawn(published=drawn.published)


def _draw_values(ax: Axes, some: DataFrame, colors: Mapping[str, str]) -> Drawn:
    both = [*some["published"], *some["reproduced"]]
    logarithmic_axis(ax, both, marks=False)
    _measured_axis(ax, both)
    ends = [min(both), max(both)]
    ax.plot(ends, ends, color=GREY, linewidth=0.8, zorder=1)
    return _points(ax, some, "reproduced", colors)


def _draw_errors(ax: Axes, some: DataFrame, colors: Mapping[str, str]) -> Drawn:
    _measured_axis(ax, [*some["published"], *some["reproduced"]])
    reach = 1.15 * max(0.001, some["relative_error"].abs().max())
    ax.set_ylim(-reach, reach)
    set_error_ticks(ax.yaxis, 4, reach)
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    return _points(ax, some, "relative_error", colors)


def _measured_axis(ax: Axes, values: Sequence[float]) -> None:
    """Draw a logarithmic x axis with ticks at powers of ten, and between powers if these are few."""
    low, high, ticks = logarithmic_ticks(values)
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    set_ticks(ax.xaxis, ticks, tick_texts(ticks))
    ax.xaxis.set_minor_locator(NullLocator())


def logarithmic_ticks(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """The lower end, the upper end and the ticks of a logarithmic axis that contains values."""
    low, high = 0.8 * min(values), 1.25 * max(values)
    return low, high, ticks_between(low, high)


def _points(ax: Axes, some: DataFrame, column: str, colors: Mapping[str, str]) -> Drawn:
    """Draw a marker for each number, with the colour of its source and the shape of its role."""
    for key, points in some.groupby(["source", "role"], sort=False):
        source, role = map(str, key)
        marker, filled, _ = _ROLES[role]
        ax.plot(
            points["published"],
            points[column],
            linestyle="none",
            marker=marker,
            markersize=3.5,
            color=colors[source],
            markerfacecolor=colors[source] if filled else "white",
            gid=f"{column} {source} {role}",
        )
    sources, roles = dict.fromkeys(some["source"]), set(some["role"])
    markers = [
        marker_line(name, GREY, marker, "" if filled else "white")
        for role, (marker, filled, name) in _ROLES.items()
        if role in roles
    ]
    return Drawn([marker_line(_table_name(source), colors[source]) for source in sources], markers)


draw = Drawing("measured", _grid)
"""What others measured on real machines beside what the suite simulates, by source."""
draw_field = Drawing("field", _field_grid)
"""Steps that others published, beside what the suite simulates, by source."""
