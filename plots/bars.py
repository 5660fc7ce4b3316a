"""Bars with their values above them, and the marks of those that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from spbench.plots.lines import Value
from spbench.plots.panel import status_mark, value_axis
from spbench.plots.series import Row
from spbench.plots.style import GREY, Look, number, strategy_name


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


def draw_rows(
    ax: Axes,
    places: Mapping[str, Sequence[Row]],
    look: Mapping[str, Look],
    value: Value,
    quantity: str,
    text: Callable[[float], str] = number,
) -> None:
    """Bars of the rows at each place of the x axis, which has a name, in their strategies' colours.

    Args:
        quantity: stands in the ids of bars, before the place's name and the strategy's.
        text: what stands above a bar of that value.
    """
    widest = max(map(len, places.values()))
    step = 0.8 / widest if widest > 1 else 0.62
    bars = []
    for place, (name, rows) in enumerate(places.items()):
        for index, row in enumerate(rows):
            at = place + (index - (len(rows) - 1) / 2) * step
            strategy = row["cell"]["strategy"]
            gid = " ".join(f"{quantity} {name} {strategy_name(strategy)}".split())
            bars.append(Bar(at, value(row), look[strategy].color, gid, status=row["status"]))
    draw_bars(ax, bars, 0.92 * step if widest > 1 else step, text)
    ax.set_xticks(range(len(places)), list(places))
    ax.set_xlim(-0.6, len(places) - 0.4)


def lost_notes(named: Iterable[tuple[str, Row]]) -> Iterator[str]:
    """A note for each named bar that could not be, but for out of memory, with its reason."""
    for name, row in named:
        if row["status"] not in ("ok", "oom"):
            reason = f" ({row['reason']})" if row.get("reason") else ""
            yield f"{name}: {row['status']}{reason}"
