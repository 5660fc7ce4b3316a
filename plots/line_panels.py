"""Panels over the sequence length or the number of GPUs: our numbers as lines, published ones as markers, and
below them the places without a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation, blended_transform_factory
from pandas import DataFrame, isna

from spbench.plots.along import LENGTHS, Along
from spbench.plots.lines import Value
from spbench.plots.panel import (
    logarithmic_axis,
    note_lines,
    notes_height_inches,
    status_mark,
    value_axis,
    write_notes,
)
from spbench.plots.series import Row, title
from spbench.plots.style import INK, PAGE_INCHES, Look, add_legend, new_figure, strategy_name

_PANEL_INCHES = 2.4
_PANELS_A_LINE = 3
_DASHES = ("--", ":", "-.")

#: where marks of places without a number stand, as a part of the panel
_MARKS_AT = 0.058
_APART_POINTS = 5.5


@dataclass(frozen=True)
class Line:
    """Rows along the x axis, drawn as one line; ``name`` is its entry in the legend."""

    name: str
    look: Look
    rows: tuple[Row, ...]
    linestyle: str = "-"


@dataclass(frozen=True)
class Quantity:
    """What is shown.

    Attributes:
        column: the quantity's name in a comparison table, and in the ids of what is drawn.
        logarithmic: for values in proportion to the x axis, whose relative errors are then seen everywhere.
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


def lines_of(
    rows: Sequence[Row], look: Mapping[str, Look], along: Along, reading: Callable[[Row], str] = lambda _: ""
) -> Iterator[Line]:
    """A line for each strategy, in the order of ``look``, and for each of its readings a dashed one."""
    for strategy, of_strategy in look.items():
        readings: dict[str, list[Row]] = {}
        for row in rows:
            if row["cell"]["strategy"] == strategy:
                readings.setdefault(reading(row), []).append(row)
        for number, (name, some) in enumerate(readings.items()):
            full = ", ".join(filter(None, (strategy_name(strategy), name)))
            in_order = tuple(sorted(some, key=along.at))
            yield Line(full, of_strategy, in_order, _DASHES[number % len(_DASHES)] if name else "-")


def line_panels(
    rows: Sequence[Row],
    panels: Mapping[str, Sequence[Line]],
    quantities: Sequence[Quantity],
    comparison: DataFrame,
    otherwise: str,
    along: Along = LENGTHS,
    remarks: Sequence[str] = (),
    theirs: str = "published",
) -> Figure:
    """A column for each of ``panels`` and a row for each quantity; of a single one of them all side by side.

    Args:
        panels: lines by the title of their panel.
        comparison: as of comparison.csv; may be empty.
        otherwise: a title, where the rows name no scenario.
        remarks: lines of text below the panels.
        theirs: what the published numbers are called.
    """
    notes = note_lines([*remarks, *_notes(panels, along)], PAGE_INCHES)
    places = [(name, quantity) for quantity in quantities for name in panels]
    columns = len(panels) if len(panels) > 1 else len(quantities)
    if len(quantities) == 1 and panels:
        columns = -(-len(panels) // -(-len(panels) // _PANELS_A_LINE))
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
        published = published_of(comparison, quantity.column)
        handles += _draw_panel(ax, panels[name], quantity, along, published, theirs)
        last = index + columns >= len(places)
        ax.set_xlabel(along.label if last else "")
        ax.set_ylabel(quantity.axis_label if index % columns == 0 or len(panels) == 1 else "")
        if index < columns or len(quantities) == 1:
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


def _draw_panel(
    ax: Axes,
    lines: Sequence[Line],
    quantity: Quantity,
    along: Along,
    published: Published,
    theirs: str,
) -> list[Artist]:
    """Everything of one panel; returns legend entries."""
    handles: list[Artist] = []
    values: list[float] = []
    seen: set[tuple[str, int, float]] = set()
    for line in lines:
        known = [(along.at(row), found) for row in line.rows if (found := quantity.value(row)) is not None]
        values += [value for _, value in known]
        handles += ax.plot(
            [at for at, _ in known],
            [value for _, value in known],
            color=line.look.color,
            linestyle=line.linestyle,
            # a number alone has no line to be seen by
            marker="." if len(known) > 1 else line.look.marker,
            markersize=3 if len(known) > 1 else 4,
            label=line.name,
            gid=f"ours {quantity.column} {line.name}",
            zorder=2,
        )
        stated = [row for row in line.rows if row["key"] in published.numbers]
        numbers = [(along.at(row), published.numbers[row["key"]]) for row in stated]
        # two readings of one published run are two lines, but one marker
        numbers = [point for point in numbers if (line.look.color, *point) not in seen]
        seen |= {(line.look.color, *point) for point in numbers}
        if numbers:
            values += [value for _, value in numbers]
            markers = _published_markers(line.look, numbers, theirs)
            markers.set_gid(f"{theirs} {quantity.column} {line.name}")
            ax.add_line(markers)
            handles.append(_published_markers(Look(INK, "o"), [], theirs))
    marks = _marks(lines, along, published)
    along.draw_axis(ax, sorted({along.at(row) for line in lines for row in line.rows}))
    if quantity.logarithmic and values:
        logarithmic_axis(ax, min(values), max(values), marks=bool(marks))
    else:
        value_axis(ax, max(values, default=0.0), marks=bool(marks))
    return handles + _draw_marks(ax, marks, along)


def _published_markers(look: Look, points: Sequence[tuple[int, float]], name: str) -> Line2D:
    return Line2D(
        [at for at, _ in points],
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
    """A place of a line that has no number: ours by its status, or published as out of memory."""

    line: Line
    status: str
    ours: bool
    at: int


def _marks(lines: Sequence[Line], along: Along, published: Published) -> list[_Mark]:
    marks = []
    seen: set[tuple[str, int]] = set()
    for line in lines:
        for row, before in zip(line.rows, [None, *line.rows], strict=False):
            # where no place further along can fit, the first says it
            said = along.oom_persists and before is not None and row["status"] == before["status"] == "oom"
            at = along.at(row)
            if row["status"] != "ok" and not said:
                marks.append(_Mark(line, row["status"], True, at))
            if row["key"] in published.out_of_memory and (line.look.color, at) not in seen:
                seen.add((line.look.color, at))
                marks.append(_Mark(line, "oom", False, at))
    return marks


def _draw_marks(ax: Axes, marks: Sequence[_Mark], along: Along) -> list[Artist]:
    """Draw them in the band below the values, lines of one place side by side; returns legend entries."""
    figure = ax.get_figure()
    assert figure is not None
    handles: list[Artist] = []
    for mark in marks:
        beside = list(dict.fromkeys(other.line.name for other in marks if other.at == mark.at))
        points = _APART_POINTS * (beside.index(mark.line.name) - (len(beside) - 1) / 2)
        drawn, entry = (_mark(mark, color, along) for color in (mark.line.look.color, INK))
        drawn.set_data([mark.at], [_MARKS_AT])
        aside = ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)
        drawn.set_transform(blended_transform_factory(ax.transData, ax.transAxes) + aside)
        drawn.set_gid(f"{'ours' if mark.ours else 'published'} {mark.status} {mark.line.name}")
        ax.add_line(drawn)
        handles.append(entry)
    return handles


def _mark(mark: _Mark, color: str, along: Along) -> Line2D:
    """A cross, or around it a ring for what was published, still without a place."""
    artist = status_mark(mark.status, color)
    if mark.status == "oom" and along.oom_persists:
        artist.set_label("out of memory from here on")
    if mark.ours:
        artist.set_markersize(4.5)
    else:
        artist.set(marker="o", markersize=8.5, markeredgewidth=1.0, markerfacecolor="none")
        artist.set_label(f"{artist.get_label()}, published")
    return artist


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


def _notes(panels: Mapping[str, Sequence[Line]], along: Along) -> list[str]:
    """A note for each line with places that could not be, but for out of memory: where, and why."""
    notes = []
    for name, lines in panels.items():
        for line in lines:
            lost = [row for row in line.rows if row["status"] not in ("ok", "oom")]
            for status in dict.fromkeys(row["status"] for row in lost):
                these = [row for row in lost if row["status"] == status]
                where = along.text([along.at(row) for row in these])
                reason = f" ({these[0]['reason']})" if these[0].get("reason") else ""
                notes.append(f"{name}, {line.name}: {status} at {where}{reason}")
    return notes
