"""A panel over the number of GPUs: its axes, the marks of cells without a number, and its notes."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from matplotlib.transforms import ScaledTranslation, blended_transform_factory

from spbench.plots.series import Row, Series, gpus
from spbench.plots.style import GREY, INK, Look, number, shortened

#: status -> (marker, filled, its name in legends); every other status without a number is a failure
_MARKS = {
    "oom": ("x", True, "out of memory"),
    "unsupported": ("s", False, "unsupported"),
}
_FAILURE = ("v", False, "failed")

#: room under zero for the marks, as a part of the panel's highest value
_BAND = 0.13
#: the same of a logarithmic axis, as a part of the whole panel
_LOG_BAND = 0.115
_OCTAVE_MARGIN = 0.35


def gpu_axis(ax: Axes, counts: Sequence[int]) -> None:
    """Number of GPUs on a log2 axis: a tick for each count, labelled as far as there is room."""
    low, high = math.log2(min(counts)) - _OCTAVE_MARGIN, math.log2(max(counts)) + _OCTAVE_MARGIN
    labelled: list[int] = []
    # the ends, then powers of two, then the others
    for count in sorted(counts, key=lambda n: (n not in (counts[0], counts[-1]), n & (n - 1) != 0, n)):
        room = (0.02 + 0.03 * len(str(count))) * (high - low)
        if all(abs(math.log2(count / other)) > room for other in labelled):
            labelled.append(count)
    ax.set_xscale("log", base=2)
    ax.set_xlim(2**low, 2**high)
    ax.xaxis.set_major_locator(FixedLocator(counts))
    ax.xaxis.set_major_formatter(FixedFormatter([str(n) if n in labelled else "" for n in counts]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("Number of GPUs")
    ax.tick_params(length=2.5, width=0.7, bottom=True)


def value_axis(ax: Axes, highest: float, *, marks: bool) -> None:
    """Values from zero up, with a band under zero where there are marks."""
    top = 1.1 * highest if highest > 0 else 1.0
    ax.set_ylim(-_BAND * top if marks else 0, top)
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
    """A log10 axis whose lowest value stands above the band of the marks."""
    top, above = math.log10(highest) + 0.1, math.log10(lowest) - 0.1
    foot = above - (top - above) * _LOG_BAND / (1 - _LOG_BAND) if marks else above
    ax.set_yscale("log")
    ax.set_ylim(10**foot, 10**top)
    first, last = math.ceil(above), math.floor(top)
    steps = (1,) if last > first else (1, 2, 5)
    ticks = [m * 10.0**n for n in range(first - 1, last + 1) for m in steps]
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if above <= math.log10(tick) <= top]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    ax.yaxis.set_minor_locator(LogLocator(subs=range(2, 10)) if marks is False else NullLocator())
    ax.yaxis.set_minor_formatter(FixedFormatter([]))
    if marks:
        ax.axhline(10**above, color=GREY, linewidth=0.7)


def mark_missing(ax: Axes, series: Sequence[tuple[Series, Sequence[Row]]], looks: dict[str, Look]) -> None:
    """Mark the rows of each line that have no number, in the band under zero; call after value_axis."""
    figure = ax.get_figure()
    assert figure is not None
    marked = [(line, rows) for line, rows in series if rows]
    level = -_BAND / 2 * ax.get_ylim()[1]
    # side by side where several lines miss the same size
    apart_points = min(6, 18 / max(1, len(marked) - 1))
    for index, (line, rows) in enumerate(marked):
        points = apart_points * (index - (len(marked) - 1) / 2)
        aside = ax.transData + ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)
        for status in dict.fromkeys(row["status"] for row in rows):
            counts = [gpus(row) for row in rows if row["status"] == status]
            mark = status_mark(status, looks[line.strategy].color)
            mark.set_data(counts, [level] * len(counts))
            mark.set_transform(aside)
            mark.set_gid(f"{status} {line.label}")
            ax.add_line(mark)


def mark_handles(rows: Sequence[Row]) -> list[Artist]:
    """Legend entries for the marks of these rows."""
    return [status_mark(status, INK) for status in dict.fromkeys(row["status"] for row in rows)]


def status_mark(status: str, color: str) -> Line2D:
    """The mark of a cell without a number, still without a place."""
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


def missing_notes(model: str, series: Sequence[tuple[Series, Sequence[Row]]]) -> list[str]:
    """A note for each line with sizes that could not be: where, and the first reason."""
    notes = []
    for line, rows in series:
        for status in dict.fromkeys(row["status"] for row in rows if row["status"] != "oom"):
            these = [row for row in rows if row["status"] == status]
            where = ", ".join(str(gpus(row)) for row in these)
            reason = f" ({these[0]['reason']})" if these[0].get("reason") else ""
            notes.append(f"{model}, {line.label}: {status} at {where} GPUs{reason}")
    return notes


def note_lines(notes: Sequence[str], width_inches: float) -> list[str]:
    """The notes, each on one or two lines of a figure of that width."""
    return [line for note in notes for line in shortened(note, int(19 * width_inches), 2).splitlines()]


def notes_height_inches(lines: Sequence[str]) -> float:
    """The height that :func:`write_notes` needs."""
    return 0.13 * len(lines) + 0.05


def write_notes(ax: Axes, lines: Sequence[str]) -> None:
    """Fill a panel, which should be as wide as the figure, with small lines of text."""
    ax.set_axis_off()
    figure = ax.get_figure()
    assert figure is not None
    text = ax.text(0.01, 1, "\n".join(lines), fontsize=6.5, color=GREY, verticalalignment="top")
    # from the figure's edge, wherever the panels above and below begin
    text.set_transform(blended_transform_factory(figure.transFigure, ax.transAxes))
    text.set_gid("notes")
    text.set_in_layout(False)
