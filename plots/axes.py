"""The axes of panels (y: values, above a band for marks; x: lengths or GPUs), and the marks and notes of rows
without a number."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, LogLocator, MaxNLocator, NullLocator

from spbench.plots.series import Row, gpus
from spbench.plots.style import GREY, INK, length_text, tick_texts

#: the height of the band for marks below the values, as a part of the whole panel
BAND = 0.115
#: the room above the highest value of a linear axis, as a part of that value, and at each end of a
#: logarithmic axis, as a part of its length
_ROOM, _LOG_ROOM = 0.14, 0.06
#: the factors of ticks of logarithmic axes between powers of ten, the fewest first
_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(tenths / 10 for tenths in range(10, 100, 2)))
_MARGIN = 0.45  # the margin at each end of an x axis, in octaves


def value_axis(ax: Axes, values: Sequence[float], *, marks: bool) -> None:
    """Draw a linear y axis from zero to above the largest value, with a band for marks below if ``marks``."""
    highest = max(values, default=0.0)
    top = (1 + _ROOM) * highest if highest > 0 else 1.0
    ax.set_ylim(-top * BAND / (1 - BAND) if marks else 0, top)
    ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top)
    set_ticks(ax.yaxis, [tick for tick in ticks if 0 <= tick <= top] if highest > 0 else [])
    if marks:
        ax.axhline(0, color=GREY, linewidth=0.7)


def logarithmic_axis(ax: Axes, values: Sequence[float], *, marks: bool) -> None:
    """Draw a log10 y axis around values, all above zero, with a band for marks below if ``marks``."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.08, _LOG_ROOM * (high - low))
    foot, top = low - room, high + room
    ax.set_yscale("log")
    ax.set_ylim(10 ** (foot - (top - foot) * BAND / (1 - BAND) if marks else foot), 10**top)
    powers = [10.0**n for n in range(math.ceil(foot), math.floor(top) + 1)]
    set_ticks(ax.yaxis, powers if len(powers) > 1 else ticks_between(10**foot, 10**top))
    ax.yaxis.set_minor_locator(NullLocator() if marks else LogLocator(subs=range(2, 10)))
    ax.yaxis.set_minor_formatter(FixedFormatter([]))
    if marks:
        ax.axhline(10**foot, color=GREY, linewidth=0.7)


def ticks_between(low: float, high: float) -> list[float]:
    """The ticks of a logarithmic axis: powers of ten, and values between powers if these are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    scales = (
        [m * 10.0**n for n in powers for m in some if low <= m * 10.0**n <= high]
        for some in _STEPS[(high <= 20 * low) + (high <= 4 * low) :]
    )
    ticks = next((ticks for ticks in scales if len(ticks) > 1), [])
    return ticks[:: 1 + len(ticks) // 7]


def set_ticks_within(axis: Axis, locator: MaxNLocator, first: float, last: float) -> None:
    """Set the ticks of an axis to those of a locator from ``first`` to ``last``."""
    set_ticks(axis, [tick for tick in locator.tick_values(first, last) if first <= tick <= last])


def set_error_ticks(axis: Axis, most: int, reach: float) -> None:
    """Set ticks, in percent, for relative errors from -reach to reach, with at most ``most`` intervals."""
    ticks = [tick for tick in MaxNLocator(most).tick_values(-reach, reach) if abs(tick) <= reach]
    set_ticks(axis, ticks, [f"{100 * tick:+.6g}%" if abs(tick) > 1e-9 else "0" for tick in ticks])


def set_ticks(axis: Axis, ticks: Sequence[float], texts: Sequence[str] | None = None) -> None:
    """Set the ticks of an axis to these values, labelled with ``texts`` or else with the values."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FixedFormatter(list(texts or tick_texts(ticks))))


def write_beside(
    ax: Axes, text: str, at: tuple[float, float], points: tuple[float, float], **style: Any
) -> None:
    """Write a small text, shifted by ``points`` (right, up) from the place ``at``."""
    ax.annotate(text, at, xytext=points, **{"textcoords": "offset points", "fontsize": 7, **style})


def inches_wide(ax: Axes) -> float:
    """The width of a panel in inches, estimated before the layout: its part of the grid, without labels."""
    widths = np.asarray(_spec(ax).get_gridspec().get_width_ratios(), dtype=float)
    part = widths[_spec(ax).colspan.start] / widths.sum()
    return float((figure_of(ax).get_figwidth() - 0.45) * part - 0.15)


def panels_abreast(ax: Axes) -> int:
    """The number of panels side by side in the panel's part of the grid."""
    return int(_spec(ax).get_gridspec().ncols)


def figure_of(ax: Axes) -> Figure:
    """The figure that contains a panel."""
    return cast("Figure", ax.get_figure(root=True))


def _spec(ax: Axes) -> SubplotSpec:
    return cast("SubplotSpec", ax.get_subplotspec())


@dataclass(frozen=True)
class Along:
    """A log2 x axis with ticks at the places of rows.

    Attributes:
        at: a function from a row to its place, such as the number of GPUs.
        tick: a function from a place to its text.
        suffix: a text that follows the places in notes.
        oom_persists: whether out of memory at one place means out of memory at all larger places.
    """

    label: str
    at: Callable[[Row], int]
    tick: Callable[[int], str]
    suffix: str
    oom_persists: bool

    def text(self, places: Sequence[int]) -> str:
        """The text of places in notes: "8, 16 GPUs"."""
        return ", ".join(map(self.tick, places)) + self.suffix

    def draw_axis(self, ax: Axes, places: Sequence[int]) -> None:
        """Set scale, limits and ticks for places in ascending order, and label as many ticks as have room:
        all ticks, or those at every octave, at every second octave, and so on."""
        inches = inches_wide(ax) / (math.log2(places[-1] / places[0]) + 2 * _MARGIN)
        labelled = list(places)
        for octaves in range(1, 64):
            room = [0.035 * (len(self.tick(a)) + len(self.tick(b))) for a, b in pairwise(labelled)]
            apart = [math.log2(b / a) * inches for a, b in pairwise(labelled)]
            if all(there > needed for there, needed in zip(apart, room, strict=True)):
                break
            labelled = [n for n in places if (math.log2(n / places[0]) / octaves).is_integer()]
        ax.set_xscale("log", base=2)
        ax.set_xlim(places[0] / 2**_MARGIN, places[-1] * 2**_MARGIN)
        set_ticks(ax.xaxis, places, [self.tick(n) if n in labelled else "" for n in places])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.tick_params(length=2.5, width=0.7, bottom=True)


LENGTHS = Along(
    "Sequence length (tokens)", lambda row: int(row["cell"]["seq_len"]), length_text, "", oom_persists=True
)
GPUS = Along("Number of GPUs", gpus, str, " GPUs", oom_persists=False)


# -- marks and notes of rows without a number ------------------------------------------------------------

#: for a status: (marker, whether it is filled, name in legends); other statuses without a number are failures
_MARKS = {"oom": ("x", True, "out of memory"), "unsupported": ("s", False, "unsupported")}
_FAILURE = ("v", False, "failed")


def status_mark(status: str, color: str = INK) -> Line2D:
    """The mark for a row with this status, which has no number; the mark has no place yet."""
    marker, filled, name = _MARKS.get(status, _FAILURE)
    return marker_line(name, color, marker, "" if filled else "white", markersize=5.5, markeredgewidth=1.4)


def marker_line(name: str, color: str, marker: str = "o", face: str = "", **style: Any) -> Line2D:
    """A marker without a place, for a legend; ``face`` is the colour of its inside, by default ``color``."""
    style |= {"color": color, "markerfacecolor": face or color}
    return Line2D([], [], linestyle="none", marker=marker, label=name, **style)


def lost_notes(named: Iterable[tuple[str, Row]]) -> Iterator[str]:
    """A note for each named row that has no number and is not out of memory, with its status and reason."""
    for name, row in named:
        if row["status"] not in ("ok", "oom"):
            yield f"{name}: {row['status']}{reason_of(row)}"


def reason_of(row: Row) -> str:
    """The reason of a row's status in brackets; "" if the row has no reason."""
    return f" ({row['reason']})" if row.get("reason") else ""
