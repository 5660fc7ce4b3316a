"""Panels of lines: our numbers joined, published ones as hollow markers, and below them the places without a
number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation, blended_transform_factory
from pandas import DataFrame, isna

from spbench.plots.along import LENGTHS, Along
from spbench.plots.lines import Line, PlottedQuantity
from spbench.plots.page import Page
from spbench.plots.panel import BAND, logarithmic_axis, reason_of, status_mark, value_axis
from spbench.plots.series import Row, grouped, title
from spbench.plots.style import INK, Look

_PANEL_INCHES = 2.4
_PANELS_A_ROW = 3
_APART_POINTS = 5.5  # between marks of one place


@dataclass(frozen=True)
class Published:
    """What was published of one quantity, by the keys of cells; ``name`` stands in legends."""

    numbers: Mapping[str, float]
    out_of_memory: frozenset[str] = frozenset()
    name: str = "published"


def published_of(comparison: DataFrame, column: str, name: str = "published") -> Published:
    """The published side of the rows of one quantity in a comparison table."""
    if comparison.empty:
        return Published({}, name=name)
    entries = comparison[comparison["quantity"] == column].to_dict("records")
    numbers = {e["cell"]: float(e["published"]) for e in entries if not isna(e["published"])}
    return Published(numbers, frozenset(e["cell"] for e in entries if e["status_published"] == "oom"), name)


def line_panels(
    rows: Sequence[Row],
    panels: Mapping[str, Sequence[Line]],
    quantities: Sequence[PlottedQuantity],
    comparison: DataFrame,
    default_title: str,
    along: Along = LENGTHS,
    remarks: Sequence[str] = (),
    theirs: str = "published",
    one_scale: bool = False,
) -> Figure:
    """A column for each of ``panels`` and a row for each quantity.

    The panels of a single quantity are laid out in rows of up to three; those of a single column of several
    quantities stand side by side.

    Args:
        panels: lines by the title of their panel.
        comparison: as of comparison.csv; may be empty.
        default_title: the title if the rows name no scenario.
        remarks: sentences below the panels.
        theirs: the name of the published numbers in the legend.
        one_scale: whether all panels of a quantity have the same y axis.
    """
    places = [(name, quantity) for quantity in quantities for name in panels]
    columns = len(panels) if len(panels) > 1 else len(quantities)
    if len(quantities) == 1 and panels:
        columns = -(-len(panels) // -(-len(panels) // _PANELS_A_ROW))
    heights = [_PANEL_INCHES] * -(-len(places) // max(1, columns))
    notes = [note for name, lines in panels.items() for note in missing_notes(name, lines, along)]
    page = Page(title(rows, default_title), heights, columns, [*remarks, *notes])
    handles: list[Artist] = []
    for index, (name, quantity) in enumerate(places):
        ax = page.panel(index // columns, index % columns)
        published = published_of(comparison, quantity.column, theirs)
        others = [line for lines in panels.values() for line in lines] if one_scale else []
        handles += draw_lines(ax, panels[name], quantity, along, published, scaled_with=others)
        last = index + columns >= len(places)
        ax.set_xlabel(along.label if last else "")
        ax.set_ylabel(quantity.axis_label if index % columns == 0 or len(panels) == 1 else "")
        if index < columns or len(quantities) == 1:
            ax.set_title(name)
    return page.finish(in_legend_order(handles, theirs))


def draw_lines(
    ax: Axes,
    lines: Sequence[Line],
    quantity: PlottedQuantity,
    along: Along,
    published: Published,
    scaled_with: Sequence[Line] = (),
) -> list[Artist]:
    """Draw lines, published markers, marks and both axes of one panel; returns legend entries.

    Args:
        scaled_with: lines of other panels that have the same y axis.
    """
    handles: list[Artist] = []
    for line in lines:
        handles += ax.plot(
            *_columns(_ours(line, quantity, along)),
            color=line.look.color,
            linestyle=line.linestyle,
            marker=line.look.marker,
            markersize=3.2,
            label=line.name,
            gid=f"ours {quantity.column} {line.name}",
            zorder=2,
        )
    for line, points in _theirs(lines, along, published):
        markers = _published_markers(line.look, published.name)
        markers.set_data(*_columns(points))
        markers.set_gid(f"published {quantity.column} {line.name}")
        ax.add_line(markers)
        handles.append(_published_markers(Look(INK, "o"), published.name))
    along.draw_axis(ax, sorted({along.at(row) for line in lines for row in line.rows}))
    scaled = [*lines, *scaled_with]
    values = [value for line in scaled for _, value in _ours(line, quantity, along)]
    values += [value for _, points in _theirs(scaled, along, published) for _, value in points]
    marks = bool(list(_marks(scaled, along, published)))
    if quantity.logarithmic and values:
        logarithmic_axis(ax, min(values), max(values), marks=marks)
    else:
        value_axis(ax, max(values, default=0.0), marks=marks)
    return handles + _draw_marks(ax, list(_marks(lines, along, published)), along)


_Points = Sequence[tuple[int, float]]


def _ours(line: Line, quantity: PlottedQuantity, along: Along) -> _Points:
    return [(along.at(row), found) for row in line.rows if (found := quantity.value(row)) is not None]


def _theirs(lines: Sequence[Line], along: Along, published: Published) -> Iterator[tuple[Line, _Points]]:
    """The published points of each line; two readings of one published run are two lines but one point."""
    seen: set[tuple[str, int, float]] = set()
    for line in lines:
        stated = [row for row in line.rows if row["key"] in published.numbers]
        points = [(along.at(row), published.numbers[row["key"]]) for row in stated]
        points = [point for point in points if (line.look.color, *point) not in seen]
        seen |= {(line.look.color, *point) for point in points}
        if points:
            yield line, points


def _columns(points: _Points) -> tuple[list[int], list[float]]:
    return [at for at, _ in points], [value for _, value in points]


def _published_markers(look: Look, name: str) -> Line2D:
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=look.marker,
        markersize=6.5,
        markerfacecolor="none",
        markeredgecolor=look.color,
        markeredgewidth=1.1,
        label=name,
        zorder=3,
    )


@dataclass(frozen=True)
class _Mark:
    """A place of a line without a number: ours by its status, or published as out of memory."""

    line: Line
    status: str
    ours: bool
    at: int


def _marks(lines: Sequence[Line], along: Along, published: Published) -> Iterator[_Mark]:
    seen: set[tuple[str, int]] = set()
    for line in lines:
        for row, before in zip(line.rows, [None, *line.rows], strict=False):
            # where out of memory persists only its first place is marked
            known = along.oom_persists and before is not None and row["status"] == before["status"] == "oom"
            at = along.at(row)
            if row["status"] != "ok" and not known:
                yield _Mark(line, row["status"], True, at)
            if row["key"] in published.out_of_memory and (line.look.color, at) not in seen:
                seen.add((line.look.color, at))
                yield _Mark(line, "oom", False, at)


def _draw_marks(ax: Axes, marks: Sequence[_Mark], along: Along) -> list[Artist]:
    """Draw marks in the band below the values, those of one place side by side; returns legend entries."""
    figure = ax.get_figure()
    assert figure is not None
    handles: list[Artist] = []
    for mark in marks:
        beside = list(dict.fromkeys(other.line.name for other in marks if other.at == mark.at))
        points = _APART_POINTS * (beside.index(mark.line.name) - (len(beside) - 1) / 2)
        drawn, entry = (_mark_artist(mark, color, along) for color in (mark.line.look.color, INK))
        drawn.set_data([mark.at], [BAND / 2])
        aside = ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)
        drawn.set_transform(blended_transform_factory(ax.transData, ax.transAxes) + aside)
        drawn.set_gid(f"{'ours' if mark.ours else 'published'} {mark.status} {mark.line.name}")
        ax.add_line(drawn)
        handles.append(entry)
    return handles


def _mark_artist(mark: _Mark, color: str, along: Along) -> Line2D:
    """The status mark of our rows, a ring around it for published ones; not yet placed."""
    artist = status_mark(mark.status, color)
    if mark.status == "oom" and along.oom_persists:
        artist.set_label("out of memory from here on")
    if mark.ours:
        artist.set_markersize(4.5)
    else:
        artist.set(marker="o", markersize=8.5, markeredgewidth=1.0, markerfacecolor="none")
        artist.set_label(f"{artist.get_label()}, published")
    return artist


def in_legend_order(handles: Iterable[Artist], theirs: str) -> list[Artist]:
    """One entry for each label: lines, then what was published, then marks."""

    def place(handle: Artist) -> int:
        assert isinstance(handle, Line2D)
        if handle.get_linestyle() != "None":
            return 0
        return 1 if handle.get_label() == theirs else 2

    entries: dict[str, Artist] = {}
    for handle in handles:
        entries.setdefault(str(handle.get_label()), handle)
    return sorted(entries.values(), key=place)


def missing_notes(panel: str, lines: Sequence[Line], along: Along) -> Iterator[str]:
    """For each line of a panel and each status but out of memory: where, and the first row's reason."""
    for line in lines:
        lost = [row for row in line.rows if row["status"] not in ("ok", "oom")]
        for status, rows in grouped(lost, _status).items():
            where = along.text([along.at(row) for row in rows])
            yield f"{panel}, {line.name}: {status} at {where}{reason_of(rows[0])}"


def _status(row: Row) -> str:
    return str(row["status"])
