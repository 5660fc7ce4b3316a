"""Ours beside what real machines measured: memory and time, by who measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from pandas import DataFrame

from spbench.plots.axes import logarithmic_axis, set_error_ticks, set_ticks
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.marks import marker_line
from spbench.plots.series import Row
from spbench.plots.style import GREY, category_colors, tick_texts

#: quantities of the comparison, and what axes say of them
_QUANTITIES = {
    "peak_memory_gib": "Peak memory (GiB)",
    "allocated_memory_gib": "Memory after a step (GiB)",
    "reserved_memory_gib": "Reserved memory (GiB)",
    "step_time_ms": "Step time (ms)",
}
#: role -> (its marker, whether that is filled, its name in the legend)
_ROLES = {
    "predicted": ("o", True, "predicted"),
    "inferred": ("o", False, "a setting was inferred from it"),
    "calibrated": ("s", False, "calibrated on it"),
}


def _grid(_: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each quantity: above ours by the measured number, below its error."""
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
    missing = len(comparison) - len(numbers)
    notes = [f"{missing} measured numbers have none of ours beside them"] if missing else []
    return PanelGrid("Measured on real machines, and ours", notes).add(facets, abreast=4)


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
    """A logarithmic x axis with ticks at powers of ten, and between them if there are few."""
    low, high = 0.8 * min(values), 1.25 * max(values)
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    powers = range(-3, 9)
    steps = (1, 2, 3, 5) if high < 10 * low else (1,)
    ticks = [m * 10.0**n for n in powers for m in steps if low <= m * 10.0**n <= high]
    set_ticks(ax.xaxis, ticks, tick_texts(ticks))
    ax.xaxis.set_minor_locator(NullLocator())


def _points(ax: Axes, some: DataFrame, column: str, colors: Mapping[str, str]) -> Drawn:
    """A marker for each number, in the colour of its source, of the shape of its role."""
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
    sources, roles = dict.fromkeys(some["source"]), dict.fromkeys(some["role"])
    entries = [marker_line(source.replace("-", " "), colors[source]) for source in sources]
    for role in roles:
        marker, filled, name = _ROLES[role]
        entries.append(marker_line(name, GREY, marker, "" if filled else "white"))
    return Drawn(published=entries)


draw = Drawing("measured", _grid)
