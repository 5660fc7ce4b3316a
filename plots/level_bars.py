"""Bars that lie on the levels 0, 1, ... of a panel, each of segments, with a text at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from spbench.plots.panel import status_mark
from spbench.plots.style import GREY, INK, number

#: bars longer than this many times the median are cut there, or a few would leave no room for the others
_LONGEST = 3.0
_HEIGHT = 0.72
#: of the length of the longest bar, what a character of the texts beyond it needs
_CHARACTER = 0.033


@dataclass(frozen=True)
class Segment:
    """A piece of a bar."""

    length: float
    color: str | tuple[float, float, float]
    gid: str
    hatch: str = ""


@dataclass(frozen=True)
class LevelBar:
    """The bar of one level.

    Attributes:
        segments: from zero on; without any, the mark of ``status`` is drawn.
        text: at its end; empty: the sum of the segments.
    """

    segments: Sequence[Segment]
    gid: str
    text: str = ""
    status: str = "ok"

    @property
    def length(self) -> float:
        """Of all segments."""
        return sum(segment.length for segment in self.segments)


def draw_levels(ax: Axes, bars: Sequence[LevelBar], reach: float = 0.0) -> None:
    """Draw a bar on each level, the first at the top, over an x axis from zero up. A bar that is much longer
    than most is cut, which the sign before its text shows.

    Args:
        reach: what the axis must show at least.
    """
    lengths = [bar.length for bar in bars if bar.segments]
    end = max(reach, min(max(lengths, default=1.0), _LONGEST * median(lengths or [1.0]))) or 1.0
    for level, bar in enumerate(bars):
        if not bar.segments:
            mark = status_mark(bar.status, GREY)
            mark.set_data([0.03 * end], [level])
            mark.set_gid(bar.gid)
            ax.add_line(mark)
            continue
        left = 0.0
        for segment in bar.segments:
            width = max(0.0, min(segment.length, end - left))
            (drawn,) = ax.barh(
                level,
                width,
                _HEIGHT,
                left,
                color=segment.color,
                hatch=segment.hatch,
                edgecolor=GREY if segment.hatch else segment.color,
                linewidth=0.4,
                zorder=2,
            )
            drawn.set_gid(segment.gid)
            left += width
        cut = bar.length > end * (1 + 1e-9)
        ax.annotate(
            ("\N{MUCH GREATER-THAN} " if cut else "") + (bar.text or number(bar.length)),
            (left, level),
            xytext=(2, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
            color=INK,
            # what crosses a panel, as the line of a limit, must not cross the text
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            zorder=4,
        )
    longest = max((len(text.get_text()) for text in ax.texts), default=0)
    ax.set_xlim(0, end * (1.1 + _CHARACTER * longest))
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, end)
    ax.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if 0 <= tick <= end]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    ax.grid(axis="y", visible=False)


def name_levels(ax: Axes, names: Sequence[str]) -> None:
    """Write a name at each level; none: the panel to the left has them."""
    ax.set_yticks(range(len(names)), list(names), fontsize=6.5)
    ax.tick_params(axis="y", length=0)


def height_inches(levels: int) -> float:
    """The height that a panel of as many levels needs, with its axis and title."""
    return 0.55 + 0.145 * math.ceil(levels)
