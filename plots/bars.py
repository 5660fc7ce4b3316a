"""Bars with their values above them, and the marks of those that have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from plots.panel import status_mark, value_axis
from plots.style import GREY, number


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        at: its place on the x axis.
        value: None: the mark of ``status`` is drawn.
    """

    at: float
    value: float | None
    color: str
    gid: str
    hatch: str = ""
    status: str = "ok"


def draw_bars(
    ax: Axes, bars: Sequence[Bar], width: float = 0.62, text: Callable[[float], str] = number
) -> None:
    """Draw the bars over an axis of values from zero up.

    Args:
        text: what stands above a bar of that value.
    """
    lost = any(bar.value is None for bar in bars)
    value_axis(ax, 1.05 * max((bar.value or 0.0 for bar in bars), default=0.0), marks=lost)
    for bar in bars:
        if bar.value is None:
            mark = status_mark(bar.status, bar.color)
            mark.set_data([bar.at], [ax.get_ylim()[0] / 2])
            mark.set_gid(bar.gid)
            ax.add_line(mark)
            continue
        edge = GREY if bar.hatch else bar.color
        (drawn,) = ax.bar(
            bar.at, bar.value, width, color=bar.color, hatch=bar.hatch, edgecolor=edge, zorder=2
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
