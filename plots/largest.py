"""Figures of searches: the largest batch or sequence length that fits, by number of GPUs and strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame

from spbench.plots.bars import Bar, draw_bars
from spbench.plots.claims import Claim, claim_handles, claims_of, draw_claims, height_inches
from spbench.plots.lines import draw_values, highest, measured, without
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
from spbench.plots.series import Row, by_model, gpu_counts, gpus, series_of, shared, title
from spbench.plots.style import (
    COLUMN_INCHES,
    INK,
    PAGE_INCHES,
    TIMES,
    Look,
    add_legend,
    house_style,
    looks,
    new_figure,
    save,
)

_PANEL_INCHES = 2.5
_PANELS_A_LINE = 3

_answer = measured("answer")


@dataclass(frozen=True)
class Quantity:
    """What was searched for.

    Attributes:
        figure: the name of the figure's files.
        field: the searched field of the cells.
        fixed, fixed_name: the field that was given instead, and its name for people.
    """

    figure: str
    title: str
    field: str
    axis_label: str
    unit: str
    fixed: str
    fixed_name: str


def draw_largest(rows: Sequence[Row], comparison: DataFrame, output: Path, quantity: Quantity) -> list[Path]:
    """Draw the figure into a folder; returns the paths of its PNG and SVG."""
    with house_style():
        return save(largest_figure(rows, comparison, quantity), output, quantity.figure)


def largest_figure(rows: Sequence[Row], comparison: DataFrame, quantity: Quantity) -> Figure:
    """One panel a model, then the claims.

    Args:
        rows: result rows; those that are not searches for the quantity are left out.
    """
    rows = [row for row in rows if (row["cell"].get("search") or {}).get("quantity") == quantity.field]
    claims, models = claims_of(comparison), by_model(rows)
    look = looks(row["cell"]["strategy"] for row in rows)
    bounds = {name: _bound_claims(models[name], claims) for name in models}
    names = sorted(models, key=lambda name: (bool(bounds[name]), name))
    lines = [names[at : at + _PANELS_A_LINE] for at in range(0, len(names), _PANELS_A_LINE)]
    width = PAGE_INCHES if claims or len(names) > 1 else COLUMN_INCHES
    missing = {name: without(series_of(models[name], look), _answer) for name in names}
    notes = note_lines([note for name in names for note in missing_notes(name, missing[name])], width)
    heights = [_PANEL_INCHES] * len(lines)
    heights += [notes_height_inches(notes)] * bool(notes) + [height_inches(claims)] * bool(claims)
    figure = new_figure(width, sum(heights), title(rows, quantity.title))
    handles: list[Artist] = []
    if not heights:
        return figure
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    for index, line in enumerate(lines):
        widths = [0.6 if bounds[name] else 1.0 for name in line]
        panels = grid[index].subgridspec(1, len(line), width_ratios=widths)
        for column, name in enumerate(line):
            ax = figure.add_subplot(panels[column])
            if bounds[name]:
                _draw_bound(ax, models[name], bounds[name], look)
            else:
                handles += _draw_lines(ax, models[name], claims, look)
            fixed = shared(models[name], quantity.fixed)
            between = "\n" if len(line) == _PANELS_A_LINE else ", "
            ax.set_title(name + (f"{between}{quantity.fixed_name} {fixed}" if fixed else ""))
            ax.set_ylabel(quantity.axis_label if column == 0 else quantity.unit)
    if notes:
        write_notes(figure.add_subplot(grid[len(lines)]), notes)
    if claims:
        draw_claims(figure.add_subplot(grid[len(heights) - 1]), claims)
    lost = [row for some in missing.values() for _, rows in some for row in rows]
    add_legend(figure, [*handles, *mark_handles(lost), *claim_handles(claims)])
    return figure


def _draw_lines(
    ax: Axes, rows: Sequence[Row], claims: Sequence[Claim], look: dict[str, Look]
) -> list[Artist]:
    """A line a strategy; returns legend entries."""
    series = series_of(rows, look)
    handles: list[Artist] = [*draw_values(ax, series, look, _answer, "largest")]
    top = highest(rows, _answer)
    implied = [point for claim in claims if (point := _implied(claim, rows)) is not None]
    if implied:
        stars = Line2D(
            *map(list, zip(*implied, strict=True)),
            linestyle="none",
            marker="*",
            markersize=11,
            markerfacecolor="white",
            markeredgecolor=INK,
            label=f"published ratio {TIMES} our denominator",
            gid="published",
            zorder=2.5,
        )
        ax.add_line(stars)
        handles.append(stars)
        top = max([top, *(value for _, value in implied)])
    missing = without(series, _answer)
    lost = [row for _, some in missing for row in some]
    gpu_axis(ax, gpu_counts(rows))
    value_axis(ax, top, marks=bool(lost))
    mark_missing(ax, missing, look)
    return handles


def _implied(claim: Claim, rows: Sequence[Row]) -> tuple[int, float] | None:
    """Where a claim would be in the panel of these rows: the published ratio times our denominator."""
    by_key = {row["key"]: row for row in rows}
    if claim.numerator not in by_key:
        return None
    if not claim.is_ratio:
        return gpus(by_key[claim.numerator]), claim.published
    denominator = by_key.get(claim.denominator)
    below = _answer(denominator) if denominator else None
    return None if below is None else (gpus(by_key[claim.numerator]), claim.published * below)


def _bound_claims(rows: Sequence[Row], claims: Sequence[Claim]) -> list[Claim]:
    """The claims that state a value, not a ratio, for a model that was run on one number of GPUs only."""
    keys = {row["key"] for row in rows}
    return [c for c in claims if not c.is_ratio and c.numerator in keys and len(gpu_counts(rows)) == 1]


def _draw_bound(ax: Axes, rows: Sequence[Row], claims: Sequence[Claim], look: dict[str, Look]) -> None:
    """Bars: what was published, and ours."""
    bars: list[Bar] = []
    names: list[str] = []
    for published in dict.fromkeys(claim.published for claim in claims):
        bars.append(Bar(len(bars), published, "0.88", "published", hatch="////"))
        names.append("published")
    series = series_of(rows, look)
    for line in series:
        for row in line.rows:
            answer = _answer(row)
            gid = f"{row['status'] if answer is None else 'largest'} {line.label}"
            bars.append(Bar(len(bars), answer, look[line.strategy].color, gid, status=row["status"]))
            names.append(line.setting or ("ours" if len(series) == 1 else line.label))
    draw_bars(ax, bars)
    ax.set_xlim(-0.6, len(bars) - 0.4)
    ax.set_xticks(range(len(bars)), names)
    ax.set_xlabel(f"{gpu_counts(rows)[0]} GPUs")
