"""Splits of the same work over the axes of a mesh: peak memory, bytes by axis and simulated time of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.along import length_text
from spbench.plots.drawing import Drawing
from spbench.plots.level_bars import LevelBar, Segment, draw_levels, height_inches, name_levels
from spbench.plots.page import Page
from spbench.plots.panel import lost_notes
from spbench.plots.series import Row, gpus, grouped, model, strategy, title
from spbench.plots.splits import axis_colors, sent_by_axis, split_names
from spbench.plots.style import INK, Look, looks, tint

_GIB = 2**30
_WIDTH_INCHES = 9.0


def _figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A row of panels for each model, cluster, batch and sequence length, with the splits from the fastest
    to the slowest, then those without a time.

    The comparison is not used: nothing was published.
    """
    look, colors = looks(map(strategy, rows)), axis_colors()
    works = {name: _by_time(some) for name, some in grouped(rows, _work).items()}
    notes = [
        note
        for name, some in works.items()
        for note in lost_notes((f"{name}, {split}", row) for split, row in some.items())
    ]
    page = Page(
        title(rows, "Splits of the same work"),
        [height_inches(len(some)) for some in works.values()],
        notes=notes,
        width_inches=_WIDTH_INCHES,
    )
    axes_used: dict[str, None] = {}
    for index, (name, some) in enumerate(works.items()):
        places = page.divided(index, 1, 3)
        memory, sent, time = (page.figure.add_subplot(places[column]) for column in range(3))
        _draw_memory(memory, some, look)
        name_levels(memory, list(some))
        draw_levels(sent, [_sent_bar(split, row, colors) for split, row in some.items()])
        draw_levels(time, [_time_bar(split, row, look) for split, row in some.items()])
        name_levels(sent, [])
        name_levels(time, [])
        memory.set_title(name, loc="left")
        memory.set_xlabel("Peak memory (GiB)")
        sent.set_xlabel("Sent by a GPU in a step (GiB)")
        time.set_xlabel("Simulated step time (s)")
        axes_used |= dict.fromkeys(axis for row in some.values() for axis in sent_by_axis(row))
    handles: list[Artist] = [Patch(color=colors[axis], label=axis) for axis in colors if axis in axes_used]
    handles.append(Line2D([], [], color=INK, linestyle="--", label="usable memory of the card"))
    return page.finish(handles, lost=[row for row in rows if row["status"] != "ok"])


def _work(row: Row) -> str:
    cell = row["cell"]
    return (
        f"{model(row)}, batch {cell['batch']}, sequence length {length_text(cell['seq_len'])}, "
        f"{gpus(row)} GPUs of {cell['cluster']}"
    )


def _by_time(rows: Sequence[Row]) -> dict[str, Row]:
    """The rows by the names of their splits, the fastest first."""
    named = zip(split_names(rows), rows, strict=True)
    return dict(sorted(named, key=lambda entry: _seconds(entry[1]) or float("inf")))


def _seconds(row: Row) -> float | None:
    seconds: float | None = row["measurement"].get("step_time_s") if row["status"] == "ok" else None
    return seconds


def _draw_memory(ax: Axes, rows: Mapping[str, Row], look: Mapping[str, Look]) -> None:
    """Peaks, those of steps that do not fit too, hatched, and the usable memory of the card as a line."""
    bars = []
    for split, row in rows.items():
        peak, color, fits = (
            row["measurement"].get("peak_memory_bytes"),
            look[strategy(row)].color,
            row["status"] == "ok",
        )
        gid = f"memory {split}"
        segments = (
            []
            if peak is None
            else [Segment(peak / _GIB, color if fits else tint(color, 0.35), gid, "" if fits else "////")]
        )
        bars.append(LevelBar(segments, gid, status=row["status"]))
    limits = [row["measurement"].get("usable_memory_bytes") for row in rows.values()]
    limit = max((nbytes / _GIB for nbytes in limits if nbytes is not None), default=0.0)
    draw_levels(ax, bars, reach=1.05 * limit)
    if limit:
        ax.axvline(limit, color=INK, linestyle="--", linewidth=0.9, zorder=3, gid="limit")


def _sent_bar(split: str, row: Row, colors: Mapping[str, str]) -> LevelBar:
    segments = [
        Segment(nbytes / _GIB, colors[axis], f"sent {axis} {split}")
        for axis, nbytes in sent_by_axis(row).items()
    ]
    return LevelBar(segments, f"sent {split}", status=row["status"])


def _time_bar(split: str, row: Row, look: Mapping[str, Look]) -> LevelBar:
    seconds = _seconds(row)
    gid = f"time {split}"
    segments = [] if seconds is None else [Segment(seconds, look[strategy(row)].color, gid)]
    return LevelBar(segments, gid, status=row["status"])


draw = Drawing(__name__, _figure)
