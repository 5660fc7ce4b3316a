"""Bars of segments: upwards over named places, or to the right on the levels of a panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Transform

from spbench.plots.axes import BAND, inches_wide, panels_abreast, set_ticks, status_mark, write_beside
from spbench.plots.grid import Drawn
from spbench.plots.lines import Value
from spbench.plots.series import Row, strategy
from spbench.plots.style import GREY, INK, Look, method_look, number, strategy_name, tick_texts, tint

#: the part of the distance between two places that the bars of a place fill: several bars, and a single one
_FILLED, _ALONE = 0.86, 0.62
#: a bar's width, as a part of its width with the gap beside it
_WIDTH = 0.94
#: bars are cut at this many times the median length, because long bars would leave no room for others
_LONGEST = 3.0
_LEVEL, _LEVEL_INCHES = 0.72, 0.15
_TEXT_INCHES = 0.062  # the width of a character
_PALE = 0.9  # weaker colours have hatches and edges of their own colour, stronger ones white hatches


@dataclass(frozen=True)
class Segment:
    """A piece of a bar; its colour is mixed with white unless ``strength`` is 1."""

    length: float
    color: str
    gid: str
    hatch: str = ""
    strength: float = 1.0


@dataclass(frozen=True)
class Bar:
    """A bar, or the mark of a row without a value.

    Attributes:
        segments: the pieces from zero on; without pieces, the mark of ``status`` is drawn.
        gid, color: the id and the colour of the mark.
        text: the text at the bar's end.
        at: the bar's place on the x axis; for bars on levels, the number of the level.
    """

    segments: Sequence[Segment]
    gid: str
    text: str = ""
    status: str = "ok"
    color: str = GREY
    at: float = 0.0

    @classmethod
    def of(cls, value: float | None, look: Look, gid: str, status: str, text: str, at: float) -> Bar:
        """A bar of one segment with a text; without a value, a bar without segments and text."""
        if value is None:
            return cls([], gid, "", status, look.color, at)
        return cls([Segment(value, look.color, gid, look.hatch)], gid, text, status, look.color, at)

    @property
    def length(self) -> float:
        """The sum of the lengths of all segments."""
        return sum(segment.length for segment in self.segments)


def fill(color: str, hatch: str = "", strength: float = 1.0) -> dict[str, Any]:
    """The keyword arguments of a patch: face colour, edge colour, hatch and line width."""
    edge = color if strength < _PALE else "white"
    return {"facecolor": tint(color, strength), "edgecolor": edge, "hatch": hatch, "linewidth": 0.5}


def bar_width(most: int) -> float:
    """The width of bars, in units of the x axis, if up to ``most`` bars stand side by side at a place."""
    return _WIDTH * _FILLED / most if most > 1 else _ALONE


def beside(place: float, count: int, width: float) -> list[float]:
    """The x coordinates of ``count`` bars of this width, side by side around a place."""
    return [place + (index - (count - 1) / 2) * width / _WIDTH for index in range(count)]


def draw_bars(ax: Axes, bars: Sequence[Bar], names: Sequence[str], width: float) -> Drawn:
    """Draw upright bars over an x axis whose places 0, 1, ... have ``names``. Texts of bars that would
    overlap are turned by 90 degrees."""
    ax.set_xlim(-0.6, len(names) - 0.4)
    set_ticks(ax.xaxis, range(len(names)), names)
    ax.grid(axis="x", visible=False)
    # the distance between neighbouring bars; a bar that is the only one of its place has the whole place
    apart = inches_wide(ax) / (len(names) + 0.2) * (1 if width == _ALONE else width / _WIDTH)
    longest = max((len(bar.text) for bar in bars), default=0)
    upright = longest * _TEXT_INCHES > apart
    marks = []
    for bar in bars:
        if not bar.segments:
            _draw_mark(ax, bar, bar.at, BAND / 2, ax.get_xaxis_transform())
            marks.append(status_mark(bar.status))
        foot = 0.0
        for segment in bar.segments:
            patch = Rectangle((bar.at - width / 2, foot), width, segment.length, **_style(segment))
            ax.add_patch(patch)
            foot += segment.length
        if bar.text:
            write_beside(ax, bar.text, (bar.at, foot), (0, 2), ha="center", rotation=90 * upright)
    # the room that an upright text needs beyond that of a level one
    room = 1 + 0.055 * (longest - 2) * upright
    return Drawn(marks=marks, values=[room * bar.length for bar in bars])


def draw_rows(
    ax: Axes,
    places: Mapping[str, Sequence[Row]],
    value: Value,
    quantity: str,
    text: Callable[[float], str] = number,
) -> Drawn:
    """Draw the rows of each named place of the x axis as bars, with the colours of their strategies.

    Args:
        quantity: the first word of the bars' ids, before the place's name and the strategy's.
        text: formats the value above each bar.
    """
    width, bars = bar_width(max(map(len, places.values()))), []
    for place, (name, rows) in enumerate(places.items()):
        for at, row in zip(beside(place, len(rows), width), rows, strict=True):
            gid = " ".join(f"{quantity} {name} {strategy_name(strategy(row))}".split())
            length, look = value(row), method_look(strategy(row))
            bars.append(Bar.of(length, look, gid, row["status"], text(length or 0), at))
    return draw_bars(ax, bars, list(places), width)


def method_patches(strategies: Mapping[str, Look], name: Callable[[str], str] = strategy_name) -> list[Patch]:
    """The legend entries of strategies whose rows are bars."""
    return [Patch(**fill(look.color, look.hatch), label=name(of)) for of, look in strategies.items()]


def draw_levels(ax: Axes, bars: Sequence[Bar], names: Sequence[str], reach: float = 0.0) -> Drawn:
    """Draw a horizontal bar on each level, the first at the top, over an x axis from zero. A bar much longer
    than most is cut, and its text begins with a sign; a bar without a text shows the sum of its segments.

    Args:
        names: the names of the levels.
        reach: a value that the x axis must contain.
    """
    lengths = [bar.length for bar in bars if bar.segments]
    end = max(reach, min(max(lengths, default=1.0), _LONGEST * median(lengths or [1.0]))) or 1.0
    for level, bar in enumerate(bars):
        if not bar.segments:
            _draw_mark(ax, bar, 0.05, level, ax.get_yaxis_transform())
            continue
        left = 0.0
        for segment in bar.segments:
            width = max(0.0, min(segment.length, end - left))
            ax.add_patch(Rectangle((left, level - _LEVEL / 2), width, _LEVEL, **_style(segment)))
            left += width
        cut = bar.length > end * (1 + 1e-9)
        text = ("\N{MUCH GREATER-THAN} " if cut else "") + (bar.text or number(bar.length))
        # a white box, so that the line of a limit does not cross the text
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
        write_beside(ax, text, (left, level), (2, 0), va="center", color=INK, bbox=box, zorder=4)
    longest = max((len(text.get_text()) for text in ax.texts), default=0)
    # the names take room from the panel; of panels side by side, only the first has names
    shown = _TEXT_INCHES * max(map(len, names), default=0) / panels_abreast(ax)
    inches = max(0.6, inches_wide(ax) - shown)
    part = max(0.3, 0.97 - _TEXT_INCHES * longest / inches)
    ax.set_xlim(0, end / part)
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ticks = [tick for tick in MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(0, end) if 0 <= tick <= end]
    if sum(1 + len(text) for text in tick_texts(ticks)) * _TEXT_INCHES > part * inches:
        ticks = [ticks[0], ticks[-1]]
    set_ticks(ax.xaxis, ticks)
    set_ticks(ax.yaxis, range(len(names)), names)
    ax.grid(axis="y", visible=False)
    return Drawn()


def levels_inches(levels: int) -> float:
    """The height in inches of a panel with this number of levels."""
    return 0.2 + _LEVEL_INCHES * levels


def _draw_mark(ax: Axes, bar: Bar, x: float, y: float, transform: Transform) -> None:
    """Draw the mark of a bar without segments."""
    mark = status_mark(bar.status, bar.color)
    mark.set(xdata=[x], ydata=[y], transform=transform, gid=bar.gid)
    ax.add_line(mark)


def _style(segment: Segment) -> dict[str, Any]:
    return fill(segment.color, segment.hatch, segment.strength) | {"gid": segment.gid, "zorder": 2}
