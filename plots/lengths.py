"""Panels over the sequence length: our numbers as lines, published ones as markers, and below them the
lengths that run out of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, blended_transform_factory
from pandas import DataFrame, isna

from plots.lines import Value
from plots.panel import note_lines, notes_height_inches, status_mark, value_axis, write_notes
from plots.series import Row, title
from plots.style import GREY, INK, PAGE_INCHES, Look, add_legend, new_figure, number

_PANEL_INCHES = 2.4
_LABELS_A_PANEL = 8

#: where marks of lengths without a number stand, and how high their band is, as parts of the panel
_MARKS_AT, _BAND = 0.058, 0.115
_APART_POINTS = 5.5


@dataclass(frozen=True)
class Line:
    """Rows of different lengths, drawn as one line; ``name`` is its entry in the legend."""

    name: str
    look: Look
    rows: tuple[Row, ...]
    linestyle: str = "-"


@dataclass(frozen=True)
class Quantity:
    """What is shown over the length.

    Attributes:
        column: the quantity's name in a comparison table, and in the ids of what is drawn.
        logarithmic: for values in proportion to the length, whose relative errors are then seen everywhere.
    """

    column: str
    axis_label: str
    value: Value
    logarithmic: bool = False


@dataclass(frozen=True)
class Published:
    """What a comparison table has of one quantity, by the keys of cells."""

    numbers: Mapping[str, float]
    out_of_memory: frozenset[str]


def lengths_figure(
    rows: Sequence[Row],
    panels: Mapping[str, Sequence[Line]],
    quantities: Sequence[Quantity],
    comparison: DataFrame,
    otherwise: str,
    remarks: Sequence[str] = (),
    theirs: str = "published",
) -> Figure:
    """A column for each of ``panels`` and a row for each quantity; of a single one of them all in one row.

    Args:
        panels: lines by the title of their panel.
        comparison: as of comparison.csv; may be empty.
        otherwise: a title, where the rows name no scenario.
        remarks: lines of text below the panels.
        theirs: what the published numbers are called.
    """
    notes = note_lines([*remarks, *_notes(panels)], PAGE_INCHES)
    places = [(name, quantity) for quantity in quantities for name in panels]
    columns = len(panels) if len(panels) > 1 else len(quantities)
    heights = [_PANEL_INCHES] * -(-len(places) // max(1, columns)) + [notes_height_inches(notes)] * bool(
        notes
    )
    figure = new_figure(PAGE_INCHES, sum(heights), title(rows, otherwise))
    if not places:
        return figure
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    handles: list[Artist] = []
    for index, (name, quantity) in enumerate(places):
        ax = figure.add_subplot(grid[index // columns, index % columns])
        handles += _draw_panel(ax, panels[name], quantity, published_of(comparison, quantity.column), theirs)
        last = index + columns >= len(places)
        ax.set_xlabel("Sequence length (tokens)" if last else "")
        ax.set_ylabel(quantity.axis_label if index % columns == 0 or len(panels) == 1 else "")
        if index < columns:
            ax.set_title(name)
    if notes:
        write_notes(figure.add_subplot(grid[len(heights) - 1, :]), notes)
    add_legend(figure, _in_order(handles, theirs))
    return figure


def published_of(comparison: DataFrame, column: str) -> Published:
    """The published side of a comparison table."""
    if comparison.empty:
        return Published({}, frozenset())
    entries = comparison[comparison["quantity"] == column].to_dict("records")
    return Published(
        {e["cell"]: float(e["published"]) for e in entries if not isna(e["published"])},
        frozenset(e["cell"] for e in entries if e["status_published"] == "oom"),
    )


def length_text(tokens: int) -> str:
    """A length as papers have it: 2K for 2048."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}K"


def _draw_panel(
    ax: Axes, lines: Sequence[Line], quantity: Quantity, published: Published, theirs: str
) -> list[Artist]:
    """Everything of one panel; returns legend entries."""
    handles: list[Artist] = []
    values: list[float] = []
    seen: set[tuple[str, int, float]] = set()
    for line in lines:
        known = [(_length(row), found) for row in line.rows if (found := quantity.value(row)) is not None]
        values += [value for _, value in known]
        handles += ax.plot(
            [length for length, _ in known],
            [value for _, value in known],
            color=line.look.color,
            linestyle=line.linestyle,
            marker=".",
            markersize=3,
            label=line.name,
            gid=f"ours {quantity.column} {line.name}",
            zorder=2,
        )
        stated = [row for row in line.rows if row["key"] in published.numbers]
        numbers = [(_length(row), published.numbers[row["key"]]) for row in stated]
        # two readings of one published run are two lines, but one marker
        numbers = [point for point in numbers if (line.look.color, *point) not in seen]
        seen |= {(line.look.color, *point) for point in numbers}
        if numbers:
            values += [value for _, value in numbers]
            markers = _published_markers(line.look, numbers, theirs)
            markers.set_gid(f"{theirs} {quantity.column} {line.name}")
            ax.add_line(markers)
            handles.append(_published_markers(Look(INK, "o"), [], theirs))
    marks = _marks(lines, published)
    _length_axis(ax, sorted({_length(row) for line in lines for row in line.rows}))
    if quantity.logarithmic and values:
        _logarithmic_axis(ax, min(values), max(values), marks=bool(marks))
    else:
        value_axis(ax, max(values, default=0.0), marks=bool(marks))
    return handles + _draw_marks(ax, marks)


def _published_markers(look: Look, points: Sequence[tuple[int, float]], name: str) -> Line2D:
    return Line2D(
        [length for length, _ in points],
        [value for _, value in points],
        linestyle="none",
        marker=look.marker,
        markersize=5.5,
        markerfacecolor="none",
        markeredgecolor=look.color,
        markeredgewidth=1.1,
        label=name,
        zorder=3,
    )


@dataclass(frozen=True)
class _Mark:
    """A length of a line that has no number: ours by its status, or published as out of memory."""

    line: Line
    status: str
    ours: bool
    length: int


def _marks(lines: Sequence[Line], published: Published) -> list[_Mark]:
    marks = []
    seen: set[tuple[str, int]] = set()
    for line in lines:
        for row, before in zip(line.rows, [None, *line.rows], strict=False):
            # of lengths that all run out of memory the shortest says it
            said = before is not None and row["status"] == before["status"] == "oom"
            if row["status"] != "ok" and not said:
                marks.append(_Mark(line, row["status"], True, _length(row)))
            if row["key"] in published.out_of_memory and (line.look.color, _length(row)) not in seen:
                seen.add((line.look.color, _length(row)))
                marks.append(_Mark(line, "oom", False, _length(row)))
    return marks


def _draw_marks(ax: Axes, marks: Sequence[_Mark]) -> list[Artist]:
    """Draw them in the band below the values, lines of one length side by side; returns legend entries."""
    figure = ax.get_figure()
    assert figure is not None
    handles: list[Artist] = []
    for mark in marks:
        beside = list(dict.fromkeys(other.line.name for other in marks if other.length == mark.length))
        points = _APART_POINTS * (beside.index(mark.line.name) - (len(beside) - 1) / 2)
        drawn, entry = (_mark(mark, color) for color in (mark.line.look.color, INK))
        drawn.set_data([mark.length], [_MARKS_AT])
        aside = ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)
        drawn.set_transform(blended_transform_factory(ax.transData, ax.transAxes) + aside)
        drawn.set_gid(f"{'ours' if mark.ours else 'published'} {mark.status} {mark.line.name}")
        ax.add_line(drawn)
        handles.append(entry)
    return handles


def _mark(mark: _Mark, color: str) -> Line2D:
    """A cross, or around it a ring for what was published, still without a place."""
    artist = status_mark(mark.status, color)
    if mark.status == "oom":
        artist.set_label("out of memory from here on")
    if mark.ours:
        artist.set_markersize(4.5)
    else:
        artist.set(marker="o", markersize=8.5, markeredgewidth=1.0, markerfacecolor="none")
        artist.set_label(f"{artist.get_label()}, published")
    return artist


def _length_axis(ax: Axes, lengths: Sequence[int]) -> None:
    """A log2 axis with a tick for each length, as many of them labelled as there is room for."""
    every = -(-len(lengths) // _LABELS_A_PANEL)
    labels = [length_text(n) if i % every == 0 else "" for i, n in enumerate(lengths)]
    ax.set_xscale("log", base=2)
    ax.set_xlim(lengths[0] / 2**0.6, lengths[-1] * 2**0.6)
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    ax.xaxis.set_major_formatter(FixedFormatter(labels))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(length=2.5, width=0.7, bottom=True)


def _logarithmic_axis(ax: Axes, lowest: float, highest: float, *, marks: bool) -> None:
    """A log10 axis whose lowest value stands above the band of the marks."""
    top, above = math.log10(highest) + 0.1, math.log10(lowest) - 0.1
    foot = above - (top - above) * _BAND / (1 - _BAND) if marks else above
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


def _in_order(handles: Iterable[Artist], theirs: str) -> list[Artist]:
    """Lines, then what is published, then marks of our own and of published runs."""

    def place(handle: Artist) -> int:
        assert isinstance(handle, Line2D)
        if handle.get_linestyle() != "None":
            return 0
        return 1 if handle.get_label() == theirs else 2

    entries: dict[str, Artist] = {}
    for handle in handles:
        entries.setdefault(str(handle.get_label()), handle)
    return sorted(entries.values(), key=place)


def _length(row: Row) -> int:
    return int(row["cell"]["seq_len"])


def _notes(panels: Mapping[str, Sequence[Line]]) -> list[str]:
    """A note for each line with lengths that could not be, but for out of memory: where, and why."""
    notes = []
    for name, lines in panels.items():
        for line in lines:
            lost = [row for row in line.rows if row["status"] not in ("ok", "oom")]
            for status in dict.fromkeys(row["status"] for row in lost):
                these = [row for row in lost if row["status"] == status]
                where = ", ".join(length_text(_length(row)) for row in these)
                reason = f" ({these[0]['reason']})" if these[0].get("reason") else ""
                notes.append(f"{name}, {line.name}: {status} at {where}{reason}")
    return notes
