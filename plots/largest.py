"""Figures of searches: the largest batch or sequence length that fits, by number of GPUs and strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import GPUS
from spbench.plots.bars import Bar, bar_width, draw_bars, name_places
from spbench.plots.claims import DrawnClaim, claims_of
from spbench.plots.line_panels import Published, draw_lines, in_legend_order, missing_notes
from spbench.plots.lines import Line, PlottedQuantity, measured
from spbench.plots.page import Page
from spbench.plots.scaling import strategy_lines
from spbench.plots.series import Row, by_model, gpu_counts, searches_for, shared, strategy, title
from spbench.plots.style import COLUMN_INCHES, PAGE_INCHES, TIMES, looks

_PANEL_INCHES = 2.5
_PANELS_A_ROW = 3
#: the width of a panel of bars, as a part of one of lines
_BARS_WIDTH = 0.6

_IMPLIED = f"published ratio {TIMES} our denominator"

_answer = measured("answer")


@dataclass(frozen=True)
class Searched:
    """A field of cells that is searched for, with its name and unit in titles and labels."""

    field: str
    name: str
    unit: str


BATCH, LENGTH = Searched("batch", "batch", "sequences"), Searched("seq_len", "sequence length", "tokens")
#: the field that is given in a search for the other
GIVEN = {BATCH: LENGTH, LENGTH: BATCH}


def largest_figure(rows: Sequence[Row], comparison: DataFrame, searched: Searched) -> Figure:
    """A panel for each model, then the claims.

    A model that was run on one number of GPUs and of which a claim states a value has bars, others lines.

    Args:
        rows: result rows; those that do not search for the field are left out.
    """
    rows = [row for row in rows if searches_for(row, searched.field)]
    claims, models = claims_of(comparison), by_model(rows)
    look = looks(map(strategy, rows))
    lines = {name: strategy_lines(some, look) for name, some in models.items()}
    stated = {name: _stated_values(some, claims) for name, some in models.items()}
    in_order = sorted(models, key=lambda name: (bool(stated[name]), name))
    names = [in_order[at : at + _PANELS_A_ROW] for at in range(0, len(in_order), _PANELS_A_ROW)]
    page = Page(
        title(rows, f"Largest {searched.name} that fits"),
        [_PANEL_INCHES] * len(names),
        notes=[note for name in models for note in missing_notes(name, lines[name], GPUS)],
        claims=claims,
        width_inches=PAGE_INCHES if claims or len(models) > 1 else COLUMN_INCHES,
    )
    axis_label, given = f"{searched.name.capitalize()} ({searched.unit})", GIVEN[searched]
    quantity = PlottedQuantity("largest", axis_label, _answer)
    handles: list[Artist] = []
    for index, some in enumerate(names):
        widths = [_BARS_WIDTH if stated[name] else 1.0 for name in some]
        places = page.divided(index, 1, len(some), width_ratios=widths)
        for column, name in enumerate(some):
            ax = page.figure.add_subplot(places[column])
            if stated[name]:
                _draw_bars(ax, lines[name], stated[name])
                ax.set_xlabel(f"{gpu_counts(models[name])[0]} GPUs")
            else:
                published = _implied(models[name], claims)
                handles += draw_lines(ax, lines[name], quantity, GPUS, published)
                ax.set_xlabel(GPUS.label)
            value = shared(models[name], given.field)
            between = "\n" if len(some) == _PANELS_A_ROW else ", "
            ax.set_title(name + (f"{between}{given.name} {value}" if value else ""))
            ax.set_ylabel(axis_label if column == 0 else searched.unit.capitalize())
    lost = [row for name in models if stated[name] for line in lines[name] for row in line.rows]
    return page.finish(in_legend_order(handles, _IMPLIED), [row for row in lost if row["status"] != "ok"])


def _implied(rows: Sequence[Row], claims: Sequence[DrawnClaim]) -> Published:
    """Where claims on these rows would be: a published ratio times our denominator, or a published value."""
    by_key = {row["key"]: row for row in rows}
    numbers = {}
    for claim in claims:
        if claim.numerator in by_key and not claim.is_ratio:
            numbers[claim.numerator] = claim.published
        elif claim.numerator in by_key and claim.denominator in by_key:
            below = _answer(by_key[claim.denominator])
            if below is not None:
                numbers[claim.numerator] = claim.published * below
    return Published(numbers, name=_IMPLIED)


def _stated_values(rows: Sequence[Row], claims: Sequence[DrawnClaim]) -> list[float]:
    """The published values of a model that was run on one number of GPUs; ratios are left out."""
    keys = {row["key"] for row in rows}
    stated = [claim.published for claim in claims if not claim.is_ratio and claim.numerator in keys]
    return list(dict.fromkeys(stated)) if len(gpu_counts(rows)) == 1 else []


def _draw_bars(ax: Axes, lines: Sequence[Line], published: Sequence[float]) -> None:
    """A bar for each published value, then one for each row."""
    bars = [Bar(at, value, "0.88", "published", hatch="////") for at, value in enumerate(published)]
    names = ["published"] * len(bars)
    for line in lines:
        for row in line.rows:
            answer = _answer(row)
            gid = f"ours {row['status'] if answer is None else 'largest'} {line.name}"
            bars.append(Bar(len(bars), answer, line.look.color, gid, status=row["status"]))
            names.append("ours" if len(lines) == 1 else line.name)
    draw_bars(ax, bars, bar_width(1))
    name_places(ax, names)
