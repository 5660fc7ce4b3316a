"""Bars, and the marks of rows that have no value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from spbench.plots.lines import Value
from spbench.plots.panel import BAND, status_mark, value_axis
from spbench.plots.series import Row, strategy
from spbench.plots.style import GREY, Look, number, strategy_name

#: of the distance between two places, the part that the bars of one place fill; one bar alone is narrower
_FILLED, _ALONE = 0.8, 0.62


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        at: its place on the x axis.
        value: its height; None draws the mark of ``status`` instead.
    """

    at: float
    value: float | None
    color: str
    gid: str
    hatch: str = ""
    status: str = "ok"


def bar_width(most: int) -> float:
    """The width of bars where up to ``most`` stand side by side at one place."""
    return 0.92 * _FILLED / most if most > 1 else _ALONE


def beside(place: float, count: int, width: float) -> list[float]:
    """Where ``count`` bars of that width stand side by side around a place."""
    return [place + (index - (count - 1) / 2) * width / 0.92 for index in range(count)]


def draw_bars(ax: Axes, bars: Sequence[Bar], width: float, text: Callable[[float], str] = number) -> None:
    """Draw bars over a y axis from zero up.

    Args:
        text: writes the value above each bar.
    """
    lost = any(bar.value is None for bar in bars)
    value_axis(ax, 1.05 * max((bar.value or 0.0 for bar in bars), default=0.0), marks=lost)
    for bar in bars:
        if bar.value is None:
            mark_missing(ax, bar.at, bar.status, bar.color, bar.gid)
            continue
        (drawn,) = ax.bar(
            bar.at,
            bar.value,
            width,
            color=bar.color,
            zorder=2,
            hatch=bar.hatch,
            edgecolor=GREY if bar.hatch else bar.color,
        )
        drawn.set_gid(bar.gid)
        ax.annotate(
            text(bar.value),
            (bar.at, bar.value),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    ax.grid(axis="x", visible=False)


def mark_missing(ax: Axes, at: float, status: str, color: str, gid: str) -> None:
    """Draw the mark of a row without a value, in the band below zero."""
    mark = status_mark(status, color)
    mark.set_transform(ax.get_xaxis_transform())
    mark.set_data([at], [BAND / 2])
    mark.set_gid(gid)
    ax.add_line(mark)


def name_places(ax: Axes, names: Sequence[str]) -> None:
    """Name the places 0, 1, ... of the x axis."""
    ax.set_xticks(range(len(names)), list(names))
    ax.set_xlim(-0.6, len(names) - 0.4)


def draw_rows(
    ax: Axes,
    places: Mapping[str, Sequence[Row]],
    look: Mapping[str, Look],
    value: Value,
    quantity: str,
    text: Callable[[float], str] = number,
) -> None:
    """Draw the rows of each named place of the x axis as bars in their strategies' colours.

    Args:
        quantity: begins the ids of bars, before the place's name and the strategy's.
        text: writes the value above each bar.
    """
    width = bar_width(max(map(len, places.values())))
    bars = []
    for place, (name, rows) in enumerate(places.items()):
        for at, row in zip(beside(place, len(rows), width), rows, strict=True):
            gid = " ".join(f"{quantity} {name} {strategy_name(strategy(row))}".split())
            bars.append(Bar(at, value(row), look[strategy(row)].color, gid, status=row["status"]))
    draw_bars(ax, bars, width, text)
    name_places(ax, list(places))
