"""The y axes of panels, and the marks and notes of rows without a number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from spbench.plots.series import Row
from spbench.plots.style import GREY, INK, number

#: status -> (marker, filled, its name in legends); every other status without a number is a failure
_MARKS = {
    "oom": ("x", True, "out of memory"),
    "unsupported": ("s", False, "unsupported"),
}
_FAILURE = ("v", False, "failed")

#: the band for marks below the values, as a part of the whole panel
BAND = 0.115


def value_axis(ax: Axes, highest: float, *, marks: bool) -> None:
    """A linear axis from zero up; with marks there is a band for them below zero."""
    top = 1.1 * highest if highest > 0 else 1.0
    ax.set_ylim(-top * BAND / (1 - BAND) if marks else 0, top)
    ticks = (
        [tick for tick in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top) if 0 <= tick <= top]
        if highest > 0
        else []
    )
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    if marks:
        ax.axhline(0, color=GREY, linewidth=0.7)


def logarithmic_axis(ax: Axes, lowest: float, highest: float, *, marks: bool) -> None:
    """A log10 axis; with marks there is a band for them below the lowest value."""
    top, above = math.log10(highest) + 0.1, math.log10(lowest) - 0.1
    foot = above - (top - above) * BAND / (1 - BAND) if marks else above
    ax.set_yscale("log")
    ax.set_ylim(10**foot, 10**top)
    first, last = math.ceil(above), math.floor(top)
    steps = (1,) if last > first else (1, 2, 5)
    ticks = [m * 10.0**n for n in range(first - 1, last + 1) for m in steps]
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if above <= math.log10(tick) <= top]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    ax.yaxis.set_minor_locator(NullLocator() if marks else LogLocator(subs=range(2, 10)))
    ax.yaxis.set_minor_formatter(FixedFormatter([]))
    if marks:
        ax.axhline(10**above, color=GREY, linewidth=0.7)


def status_mark(status: str, color: str) -> Line2D:
    """The mark of a row without a number, not yet placed."""
    marker, filled, name = _MARKS.get(status, _FAILURE)
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=marker,
        markersize=5.5,
        markeredgewidth=1.4,
        markeredgecolor=color,
        markerfacecolor=color if filled else "white",
        label=name,
    )


def mark_handles(rows: Sequence[Row]) -> list[Artist]:
    """Legend entries of the marks of these rows."""
    return [status_mark(status, INK) for status in dict.fromkeys(row["status"] for row in rows)]


def lost_notes(named: Iterable[tuple[str, Row]]) -> Iterator[str]:
    """A sentence for each named row that has no number, except those out of memory, with its reason."""
    for name, row in named:
        if row["status"] not in ("ok", "oom"):
            yield f"{name}: {row['status']}{reason_of(row)}"


def reason_of(row: Row) -> str:
    """The reason of a row's status in brackets, empty if it has none."""
    return f" ({row['reason']})" if row.get("reason") else ""
