"""Splits of the same work over the axes of a mesh: peak memory, bytes by axis and simulated time of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.axes import length_text
from spbench.plots.bars import Bar, Segment, draw_levels, fill, levels_inches
from spbench.plots.drawing import Drawing
from spbench.plots.grid import Drawn, Panel, PanelGrid
from spbench.plots.marks import lost_notes
from spbench.plots.series import Row, gpus, grouped, model, strategy, title
from spbench.plots.splits import axis_colors, sent_by_axis, split_names
from spbench.plots.style import INK, method_color

_GIB = 2**30


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A row of panels for each model, cluster, batch and sequence length, with the splits from the fastest
    to the slowest, then those without a time.

    The comparison is not used: nothing was published.
    """
    works = {name: _by_time(some) for name, some in grouped(rows, _work).items()}
    notes = [
        note
        for name, some in works.items()
        for note in lost_notes((f"{name}, {split}", row) for split, row in some.items())
    ]
    lost = [row for row in rows if row["status"] != "ok"]
    grid = PanelGrid(title(rows, "Splits of the same work"), notes, lost, page_only=True)
    used = {axis for row in rows for axis in sent_by_axis(row)}
    for name, some in works.items():
        shape: Any = {"scale": name, "inches": levels_inches(len(some))}
        memory = Panel(partial(_draw_memory, rows=some), name, "Peak memory (GiB)", **shape)
        sent = Panel(partial(_draw_sent, rows=some, used=used), "", "Sent by a GPU\nin a step (GiB)", **shape)
        time = Panel(partial(_draw_time, rows=some), "", "Simulated step\ntime (s)", **shape)
        grid.add([[memory], [sent], [time]])
    return grid


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


def _draw_memory(ax: Axes, rows: Mapping[str, Row]) -> Drawn:
    """Peaks, those of steps that do not fit too, hatched, and the usable memory of the card as a line."""
    bars = []
    for split, row in rows.items():
        peak, color = row["measurement"].get("peak_memory_bytes"), method_color(strategy(row))
        gid, unlike = f"memory {split}", ("", 1.0) if row["status"] == "ok" else ("////", 0.35)
        segments = [] if peak is None else [Segment(peak / _GIB, color, gid, *unlike)]
        bars.append(Bar(segments, gid, status=row["status"]))
    limits = [row["measurement"].get("usable_memory_bytes") for row in rows.values()]
    limit = max((nbytes / _GIB for nbytes in limits if nbytes is not None), default=0.0)
    draw_levels(ax, bars, list(rows), reach=1.05 * limit)
    if not limit:
        return Drawn()
    ax.axvline(limit, color=INK, linestyle="--", linewidth=0.9, zorder=3, gid="limit")
    line = Line2D([], [], color=INK, linestyle="--", linewidth=0.9, label="usable memory of the card")
    return Drawn(published=[line])


def _draw_sent(ax: Axes, rows: Mapping[str, Row], used: set[str]) -> Drawn:
    """Bytes by the axis of the mesh along which they are sent; the legend has the axes in ``used``."""
    colors, bars = axis_colors(), []
    for split, row in rows.items():
        segments = [
            Segment(nbytes / _GIB, colors[axis], f"sent {axis} {split}")
            for axis, nbytes in sent_by_axis(row).items()
        ]
        bars.append(Bar(segments, f"sent {split}", status=row["status"]))
    draw_levels(ax, bars, list(rows))
    return Drawn(methods=[Patch(**fill(color), label=axis) for axis, color in colors.items() if axis in used])


def _draw_time(ax: Axes, rows: Mapping[str, Row]) -> Drawn:
    bars = []
    for split, row in rows.items():
        seconds, gid = _seconds(row), f"time {split}"
        segments = [] if seconds is None else [Segment(seconds, method_color(strategy(row)), gid)]
        bars.append(Bar(segments, gid, status=row["status"]))
    return draw_levels(ax, bars, list(rows))


draw = Drawing(__name__, _grid)
