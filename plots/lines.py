"""Panels of lines: our numbers as lines, published numbers as hollow markers, and marks below for places
without a number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation, blended_transform_factory
from pandas import DataFrame, isna

from spbench.plots.axes import BAND, GPUS, LENGTHS, Along, figure_of, marker_line, reason_of, status_mark
from spbench.plots.grid import Drawn, Panel, PanelGrid
from spbench.plots.series import Row, differing_settings, grouped, strategy, title
from spbench.plots.style import INK, Look, looks, strategy_name

#: the dashes of further lines of one strategy
_DASHES: tuple[Any, ...] = ("--", ":", (0, (4, 1.2, 1, 1.2, 1, 1.2)))
_APART_POINTS = 5.5  # the distance between marks of one place

#: a function from a row to its value of a quantity; None if the row has no value
Value = Callable[[Row], float | None]


def measured(field: str, unit: float = 1) -> Value:
    """A function from a row to a field of its measurement, divided by ``unit``; None if it is not ok."""

    def value(row: Row) -> float | None:
        number = row["measurement"].get(field) if row["status"] == "ok" else None
        return None if number is None else number / unit

    return value


@dataclass(frozen=True)
class PlottedQuantity:
    """The quantity of a y axis.

    Attributes:
        column: the quantity's name in a comparison table, and in the ids of lines and markers.
        logarithmic: for values that grow with the x axis, so that relative errors can be seen everywhere.
        interval: a function from a row to the ends of its vertical bar; None: rows have no bars.
    """

    column: str
    axis_label: str
    value: Value
    logarithmic: bool = False
    interval: Callable[[Row], tuple[float, float] | None] | None = None


#: the quantity of every figure of throughput over lengths or many GPUs
TOKENS_PER_SECOND = PlottedQuantity(
    "throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s"), logarithmic=True
)


@dataclass(frozen=True)
class Line:
    """Rows along the x axis that are drawn as one line, with the label ``name``, shifted to the right by
    ``aside`` points."""

    name: str
    look: Look
    rows: tuple[Row, ...]
    linestyle: Any = "-"
    aside: float = 0.0


def lines_of(rows: Sequence[Row], along: Along, setting: Callable[[Row], str] = lambda _: "") -> list[Line]:
    """A line for each strategy, in the order of legends, or a dashed line for each of its settings.

    Args:
        setting: a function from a row to the settings in which it differs from others of its strategy; "".
    """
    rows_of, lines = grouped(rows, strategy), []
    for name, its_look in looks(rows_of).items():
        for index, (text, some) in enumerate(grouped(rows_of[name], setting).items()):
            label = ", ".join(filter(None, (strategy_name(name), text)))
            dashes = _DASHES[index % len(_DASHES)] if text else "-"
            lines.append(Line(label, its_look, tuple(sorted(some, key=along.at)), dashes))
    return lines


def lines_by_setting(rows: Sequence[Row], ignored: Sequence[str] = ()) -> list[Line]:
    """Lines over the number of GPUs, one for each strategy, and for each setting in which rows of one
    strategy and GPU count differ.

    Args:
        ignored: settings that do not distinguish lines.
    """
    return lines_of(rows, GPUS, differing_settings(rows, ignored))


@dataclass(frozen=True)
class Published:
    """The published numbers of one quantity, by the keys of cells; ``name`` is their name in legends."""

    numbers: Mapping[str, float]
    out_of_memory: frozenset[str] = frozenset()
    name: str = "published"


def published_of(comparison: DataFrame, column: str, name: str = "published") -> Published:
    """The published numbers of one quantity in a comparison table."""
    if comparison.empty:
        return Published({}, name=name)
    entries = comparison[comparison["quantity"] == column].to_dict("records")
    numbers = {e["cell"]: float(e["published"]) for e in entries if not isna(e["published"])}
    return Published(numbers, frozenset(e["cell"] for e in entries if e["status_published"] == "oom"), name)


def line_grid(
    rows: Sequence[Row],
    facets: Mapping[str, Sequence[Line]],
    quantities: Sequence[PlottedQuantity],
    comparison: DataFrame,
    default_title: str,
    along: Along = LENGTHS,
    remarks: Sequence[str] = (),
    theirs: str = "published",
    one_scale: bool = True,
) -> PanelGrid:
    """A column for each facet and a row for each quantity.

    Args:
        facets: the lines of each column, by the column's title.
        comparison: the table of comparison.csv; may be empty.
        default_title: the title if the rows name no scenario.
        remarks: sentences below the panels.
        theirs: the name of the published numbers in the legend.
        one_scale: whether all panels share the x axis, and panels of a quantity the y axis.
    """
    notes = [note for name, lines in facets.items() for note in missing_notes(name, lines, along)]
    return PanelGrid(title(rows, default_title), [*remarks, *notes]).add(
        [
            [
                line_panel(
                    name,
                    lines,
                    quantity,
                    along,
                    published_of(comparison, quantity.column, theirs),
                    quantity.column if one_scale else None,
                )
                for quantity in quantities
            ]
            for name, lines in facets.items()
        ]
    )


def line_panel(
    name: str,
    lines: Sequence[Line],
    quantity: PlottedQuantity,
    along: Along,
    published: Published,
    scale: str | None,
) -> Panel:
    """A panel of lines with the title ``name``; panels of one ``scale`` share their axes."""
    return Panel(
        partial(draw_lines, lines=lines, quantity=quantity, along=along, published=published),
        name,
        along.label,
        quantity.axis_label,
        along,
        "log" if quantity.logarithmic else "linear",
        scale,
    )


def draw_lines(
    ax: Axes, lines: Sequence[Line], quantity: PlottedQuantity, along: Along, published: Published
) -> Drawn:
    """Draw lines, published markers, and marks in the band below the values."""
    drawn: list[Line2D] = []
    values: list[float] = []
    for line in lines:
        points = [(along.at(row), y) for row in line.rows if (y := quantity.value(row)) is not None]
        beside = ax.transData + ScaledTranslation(line.aside / 72, 0, figure_of(ax).dpi_scale_trans)
        drawn += ax.plot(
            *_columns(points),
            color=line.look.color,
            linestyle=line.linestyle,
            marker=line.look.marker,
            markersize=3.6,
            label=line.name,
            gid=f"ours {quantity.column} {line.name}",
            zorder=2,
            transform=beside,
        )
        values += [value for _, value in points]
        if quantity.interval:
            ends = {along.at(row): of for row in line.rows if (of := quantity.interval(row))}
            bars = ax.vlines([*ends], *_columns([*ends.values()]), colors=line.look.color, linewidth=0.9)
            bars.set(alpha=0.55, transform=beside, gid=f"interval {quantity.column} {line.name}")
            values += [end for both in ends.values() for end in both]
    entries = []
    for line, stated in _theirs(lines, along, published):
        markers = _published_markers(line.look, published.name)
        markers.set_data(*_columns(stated))
        markers.set_gid(f"published {quantity.column} {line.name}")
        ax.add_line(markers)
        values += [value for _, value in stated]
        entries.append(_published_markers(Look(INK, "o"), published.name))
    marks = _draw_marks(ax, list(_marks(lines, along, published)), along)
    return Drawn(drawn, entries, marks, values, [along.at(row) for line in lines for row in line.rows])


_Points = Sequence[tuple[int, float]]


def _theirs(lines: Sequence[Line], along: Along, published: Published) -> Iterator[tuple[Line, _Points]]:
    """Each line with its published points; a point that two lines of one colour share is drawn once."""
    seen: set[tuple[str, int, float]] = set()
    for line in lines:
        stated = [row for row in line.rows if row["key"] in published.numbers]
        points = [(along.at(row), published.numbers[row["key"]]) for row in stated]
        points = [point for point in points if (line.look.color, *point) not in seen]
        seen |= {(line.look.color, *point) for point in points}
        if points:
            yield line, points


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [at for at, _ in points], [value for _, value in points]


def _published_markers(look: Look, name: str) -> Line2D:
    return marker_line(name, look.color, look.marker, "none", markersize=6.5, markeredgewidth=1.0, zorder=3)


class _Mark(NamedTuple):
    """A place of a line without a number: by the status of our row, or published as out of memory."""

    line: Line
    status: str
    ours: bool
    at: int


def _marks(lines: Sequence[Line], along: Along, published: Published) -> Iterator[_Mark]:
    seen: set[tuple[str, int]] = set()
    for line in lines:
        for row, before in zip(line.rows, [None, *line.rows], strict=False):
            # where out of memory persists, only its first place is marked
            implied = along.oom_persists and before is not None and row["status"] == before["status"] == "oom"
            at = along.at(row)
            if row["status"] != "ok" and not implied:
                yield _Mark(line, row["status"], True, at)
            if row["key"] in published.out_of_memory and (line.look.color, at) not in seen:
                seen.add((line.look.color, at))
                yield _Mark(line, "oom", False, at)


def _draw_marks(ax: Axes, marks: Sequence[_Mark], along: Along) -> list[Line2D]:
    """Draw marks in the band below the values, marks of one place side by side; returns legend entries."""
    entries = []
    for mark in marks:
        beside = list(dict.fromkeys(other.line.name for other in marks if other.at == mark.at))
        points = _APART_POINTS * (beside.index(mark.line.name) - (len(beside) - 1) / 2)
        drawn, entry = (_mark_artist(mark, color, along) for color in (mark.line.look.color, INK))
        drawn.set_data([mark.at], [BAND / 2])
        aside = ScaledTranslation(points / 72, 0, ax.figure.dpi_scale_trans)
        drawn.set_transform(blended_transform_factory(ax.transData, ax.transAxes) + aside)
        drawn.set_gid(f"{'ours' if mark.ours else 'published'} {mark.status} {mark.line.name}")
        ax.add_line(drawn)
        entries.append(entry)
    return entries


def _mark_artist(mark: _Mark, color: str, along: Along) -> Line2D:
    """The mark of a status (a ring, if the status was published), without a place."""
    artist = status_mark(mark.status, color)
    if mark.status == "oom" and along.oom_persists:
        artist.set_label("out of memory from here on")
    if mark.ours:
        artist.set_markersize(4.5)
    else:
        artist.set(marker="o", markersize=8.5, markeredgewidth=1.0, markerfacecolor="none")
        artist.set_label(f"{artist.get_label()}, published")
    return artist


def missing_notes(panel: str, lines: Sequence[Line], along: Along) -> Iterator[str]:
    """A note for each status (except out of memory) and reason in a panel, with the lines and places."""
    lost: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        some = [row for row in line.rows if row["status"] not in ("ok", "oom")]
        for status, rows in grouped(some, lambda row: str(row["status"])).items():
            where = along.text([along.at(row) for row in rows])
            lost.setdefault((status, where, reason_of(rows[0])), []).append(line.name)
    for (status, where, reason), names in lost.items():
        yield f"{panel}, {' and '.join(names)}: {status} at {where}{reason}".replace("\n", " ")
