"""Bytes that a GPU sends in a training step, metered and by the strategy's closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.claims import claims_of, draw_claims, height_inches
from spbench.plots.lines import LINESTYLES
from spbench.plots.panel import (
    gpu_axis,
    mark_handles,
    mark_missing,
    missing_notes,
    note_lines,
    notes_height_inches,
    value_axis,
    write_notes,
)
from spbench.plots.series import Row, Series, by_model, gpu_counts, gpus, series_of, shared, title
from spbench.plots.style import (
    GREY,
    INK,
    PAGE_INCHES,
    Look,
    add_legend,
    house_style,
    looks,
    new_figure,
    save,
    strategy_name,
    tint,
)

_PANEL_INCHES = 2.4

#: phase -> (strength of the strategy's colour, hatch)
_PHASES = {"forward": (1.0, ""), "backward": (0.6, ""), "gradient_sync": (0.25, "")}
_OTHER_PHASE = (0.25, "....")

#: engine -> (marker, size in points, filled); rings stand around dots where engines agree
_ENGINES = {"virtual": ("o", 4.0, True), "distributed": ("o", 9.0, False)}
_OTHER_ENGINE = ("s", 9.0, False)


@dataclass(frozen=True)
class _Unit:
    name: str
    nbytes: int


_UNITS = (_Unit("GiB", 2**30), _Unit("MiB", 2**20), _Unit("KiB", 2**10), _Unit("bytes", 1))


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw communication.png and communication.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, whose measurement has ``communication`` and ``formula``.
        comparison: the table of comparison.csv; may be empty.
    """
    with house_style():
        return save(communication_figure(rows, comparison), output, "communication")


def sent_bytes(row: Row, source: str, phase: str | None = None) -> float | None:
    """Bytes that a rank sent, in one phase or in all; None where that is not known.

    Args:
        source: communication (metered) or formula (the closed form).
    """
    entries = row["measurement"].get(source)
    if row["status"] != "ok" or entries is None:
        return None
    if source == "formula" and not entries and row["measurement"].get("communication"):
        return None
    return float(sum(entry["sent_bytes"] for entry in entries if phase in (None, entry["phase"])))


def communication_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """For each model a panel of all bytes by GPU count and one of the same by phase; then the claims."""
    claims, models = claims_of(comparison), by_model(rows)
    look = looks(row["cell"]["strategy"] for row in rows)
    series = {name: series_of(models[name], look, apart_from=("engine",)) for name in models}
    missing = {
        name: [(line, [r for r in line.rows if r["status"] != "ok"]) for line in series[name]]
        for name in models
    }
    notes = [note for name in models for note in missing_notes(name, missing[name])]
    notes = note_lines(
        notes + [note for name in models for note in _differences(name, models[name])], PAGE_INCHES
    )
    heights = [_PANEL_INCHES] * len(models)
    heights += [notes_height_inches(notes)] * bool(notes) + [height_inches(claims)] * bool(claims)
    figure = new_figure(PAGE_INCHES, sum(heights), title(rows, "Bytes sent per GPU and step"))
    if not heights:
        return figure
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    handles: list[Artist] = []
    for index, name in enumerate(models):
        halves = grid[index].subgridspec(1, 2)
        left, right = figure.add_subplot(halves[0]), figure.add_subplot(halves[1])
        totals = [sent_bytes(row, source) for row in models[name] for source in ("communication", "formula")]
        highest = max((total for total in totals if total is not None), default=0.0)
        unit = next((unit for unit in _UNITS if highest >= unit.nbytes), _UNITS[-1])
        handles += _draw_totals(left, series[name], look, unit)
        handles += _draw_phases(right, series[name], look, unit)
        lost = [row for _, some in missing[name] for row in some]
        gpu_axis(left, gpu_counts(models[name]))
        for ax in (left, right):
            value_axis(ax, highest / unit.nbytes, marks=bool(lost) and ax is left)
            ax.set_ylabel(f"Sent per GPU and step ({unit.name})")
        mark_missing(left, missing[name], look)
        given = {"batch": shared(models[name], "batch"), "L": shared(models[name], "seq_len")}
        left.set_title(", ".join([name, *(f"{what} {value}" for what, value in given.items() if value)]))
        right.set_title(f"{name}, by phase")
    if notes:
        write_notes(figure.add_subplot(grid[len(models)]), notes)
    if claims:
        draw_claims(figure.add_subplot(grid[len(heights) - 1]), claims)
    lost = [row for some in missing.values() for _, lines in some for row in lines]
    handles.sort(key=lambda handle: isinstance(handle, Patch))
    add_legend(figure, [*handles, *mark_handles(lost)])
    return figure


def _draw_totals(ax: Axes, series: Sequence[Series], look: dict[str, Look], unit: _Unit) -> list[Artist]:
    """Lines of the closed form, markers of the meters; returns legend entries."""
    handles: list[Artist] = []
    engines: dict[str, Artist] = {}
    styles: dict[str, str] = {}
    for line in series:
        color = look[line.strategy].color
        formula = {gpus(row): sent for row in line.rows if (sent := sent_bytes(row, "formula")) is not None}
        handles += ax.plot(
            list(formula),
            [sent / unit.nbytes for sent in formula.values()],
            color=color,
            marker="_" if len(formula) == 1 else "",  # a line needs two points
            markersize=14,
            linestyle=styles.setdefault(line.setting, LINESTYLES[len(styles) % len(LINESTYLES)]),
            label=f"{line.label}, closed form",
            gid=f"formula {line.label}",
            zorder=2,
        )
        for engine in dict.fromkeys(row["cell"].get("engine", "virtual") for row in line.rows):
            rows = [row for row in line.rows if row["cell"].get("engine", "virtual") == engine]
            known = [(gpus(row), s) for row in rows if (s := sent_bytes(row, "communication")) is not None]
            dots = _engine_marker(engine, color)
            dots.set_data([count for count, _ in known], [sent / unit.nbytes for _, sent in known])
            dots.set_gid(f"{engine} {line.label}")
            ax.add_line(dots)
            engines.setdefault(engine, _engine_marker(engine, INK))
    return [*handles, *engines.values()]


def _engine_marker(engine: str, color: str) -> Line2D:
    marker, size, filled = _ENGINES.get(engine, _OTHER_ENGINE)
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=marker,
        markersize=size,
        markeredgewidth=1.2,
        markeredgecolor=color,
        markerfacecolor=color if filled else "none",
        label=f"metered, {engine}",
        zorder=3,
    )


def _draw_phases(ax: Axes, series: Sequence[Series], look: dict[str, Look], unit: _Unit) -> list[Artist]:
    """Stacked bars of the metered bytes, a bar a line of the left panel at each GPU count; legend entries."""
    counts = gpu_counts(row for line in series for row in line.rows)
    present = {entry["phase"] for line in series for row in line.rows for entry in _entries(row)}
    phases = [phase for phase in _PHASES if phase in present] + sorted(present - set(_PHASES))
    width = 0.8 / max(1, len(series))
    for index, line in enumerate(series):
        # one bar a size: where both engines ran it, the virtual one, which comes last here
        rows = sorted(line.rows, key=lambda row: row["cell"].get("engine", "virtual") == "virtual")
        best = {gpus(row): row for row in rows if sent_bytes(row, "communication") is not None}
        for count, row in best.items():
            bottom = 0.0
            for phase in phases:
                height = (sent_bytes(row, "communication", phase) or 0.0) / unit.nbytes
                strength, hatch = _PHASES.get(phase, _OTHER_PHASE)
                (bar,) = ax.bar(
                    counts.index(count) + (index - (len(series) - 1) / 2) * width,
                    height,
                    0.92 * width,
                    bottom=bottom,
                    color=tint(look[line.strategy].color, strength),
                    edgecolor=look[line.strategy].color,
                    linewidth=0.5,
                    hatch=hatch,
                    zorder=2,
                )
                bar.set_gid(f"{phase} {line.label} {count}")
                bottom += height
    ax.set_xticks(range(len(counts)), [str(count) for count in counts])
    ax.set_xlim(-0.6, len(counts) - 0.4)
    ax.grid(axis="x", visible=False)
    ax.set_xlabel("Number of GPUs")
    return [_phase_patch(phase) for phase in phases]


def _entries(row: Row) -> list[dict[str, str]]:
    return [entry for entry in row["measurement"].get("communication") or [] if entry["sent_bytes"]]


def _phase_patch(phase: str) -> Patch:
    strength, hatch = _PHASES.get(phase, _OTHER_PHASE)
    return Patch(
        facecolor=tint(GREY, strength),
        edgecolor=GREY,
        linewidth=0.5,
        hatch=hatch,
        label=phase.replace("_", " "),
    )


def _differences(model: str, rows: Sequence[Row]) -> list[str]:
    """A line for each row whose metered bytes are not those of the closed form."""
    notes = []
    for row in rows:
        metered, formula = sent_bytes(row, "communication"), sent_bytes(row, "formula")
        if metered is not None and formula is not None and not math.isclose(metered, formula):
            where = f"{strategy_name(row['cell']['strategy'])} at {gpus(row)} GPUs"
            notes.append(f"{model}, {where}: metered {metered:,.0f} bytes, closed form {formula:,.0f}")
    return notes
