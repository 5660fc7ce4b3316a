"""Figures of searches: the largest batch or sequence length that fits, by number of GPUs and strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from pandas import DataFrame

from spbench.plots.axes import GPUS
from spbench.plots.bars import Bar, Segment, bar_width, draw_bars
from spbench.plots.claims import DrawnClaim, claims_of, claims_panel
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.lines import (
    Line,
    PlottedQuantity,
    Published,
    line_panel,
    lines_by_setting,
    measured,
    missing_notes,
)
from spbench.plots.series import Row, by_model, gpu_counts, searches_for, shared, title
from spbench.plots.style import GREY, TIMES, number

#: the width of a panel of bars, as a part of one of lines
_BARS_WIDTH = 0.6

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


def largest(rows: Sequence[Row], comparison: DataFrame, searched: Searched) -> PanelGrid:
    """A panel for each model, then the claims.

    A model that was run on one number of GPUs and of which a claim states a value has bars, others lines.

    Args:
        rows: result rows; those that do not search for the field are left out.
    """
    rows = [row for row in rows if searches_for(row, searched.field)]
    claims, models = claims_of(comparison), by_model(rows)
    lines = {name: lines_by_setting(some) for name, some in models.items()}
    stated = {name: _stated_values(some, claims) for name, some in models.items()}
    lost = [row for name, some in models.items() if stated[name] for row in some if row["status"] != "ok"]
    grid = PanelGrid(
        title(rows, f"Largest {searched.name} that fits"),
        [note for name in models for note in missing_notes(name, lines[name], GPUS)],
        lost,
    )
    label = f"{searched.name.capitalize()} ({searched.unit})"
    quantity = PlottedQuantity("largest", label, _answer)
    in_order = sorted(models, key=lambda name: (bool(stated[name]), name))
    facets = []
    for name in in_order:
        given = shared(models[name], GIVEN[searched].field)
        heading = name + (f", {GIVEN[searched].name} {given}" if given else "")
        if stated[name]:
            draw = partial(_draw_bars, lines=lines[name], published=stated[name])
            x_label = f"{gpu_counts(models[name])[0]} GPUs"
            facets.append([Panel(draw, heading, x_label, label, axis="linear", width=_BARS_WIDTH)])
        else:
            published = _implied(models[name], claims)
            facets.append([line_panel(heading, lines[name], quantity, GPUS, published, "largest")])
    return grid.add(facets).add(claims_panel(claims))


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
    return Published(numbers, name=f"published ratio {TIMES} our denominator")


def _stated_values(rows: Sequence[Row], claims: Sequence[DrawnClaim]) -> list[float]:
    """The published values of a model that was run on one number of GPUs; ratios are left out."""
    keys = {row["key"] for row in rows}
    stated = [claim.published for claim in claims if not claim.is_ratio and claim.numerator in keys]
    return list(dict.fromkeys(stated)) if len(gpu_counts(rows)) == 1 else []


def _draw_bars(ax: Axes, lines: Sequence[Line], published: Sequence[float]) -> Drawn:
    """A bar for each published value, then one for each row."""
    bars = [
        Bar([Segment(value, GREY, "published", "////", 0.15)], "published", number(value), at=at)
        for at, value in enumerate(published)
    ]
    names = ["published"] * len(bars)
    for line in lines:
        for row in line.rows:
            answer = _answer(row)
            gid = f"ours {row['status'] if answer is None else 'largest'} {line.name}"
            bars.append(Bar.of(answer, line.look, gid, row["status"], number(answer or 0), len(bars)))
            names.append("ours" if len(lines) == 1 else line.name)
    return draw_bars(ax, bars, names, bar_width(1))


draw_max_batch = Drawing("max_batch", partial(largest, searched=BATCH), "searches for the largest batch")
"""The largest batch that fits by number of GPUs: RSA (arXiv 2105.13120), Figures 3a and 7a."""

draw_max_seqlen = Drawing("max_seqlen", partial(largest, searched=LENGTH), "searches for the largest seq_len")
"""The largest sequence length that fits by number of GPUs: RSA (arXiv 2105.13120), Figures 5a, 5b and 9."""
