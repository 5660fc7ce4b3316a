"""The longest sequence and the largest batch of each split over the axes of a mesh, beside a baseline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.claims import claims_of
from spbench.plots.drawing import Drawing
from spbench.plots.largest import BATCH, GIVEN, LENGTH, Searched
from spbench.plots.level_bars import LevelBar, Segment, draw_levels, height_inches, name_levels
from spbench.plots.page import Page
from spbench.plots.panel import lost_notes
from spbench.plots.series import Row, by_model, searches_for, shared, strategy, title
from spbench.plots.splits import split_names
from spbench.plots.style import TIMES, looks, number

_WIDTH_INCHES = 8.5


def _figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A row for each model, of a panel for the longest sequence and one for the largest batch, with the
    splits from the longest sequence to the shortest; a bar's ratio to the baseline, where the comparison has
    one, stands at its end."""
    rows = [row for row in rows if any(searches_for(row, searched.field) for searched in (LENGTH, BATCH))]
    look, ratios = looks(map(strategy, rows)), {c.numerator: c.ours for c in claims_of(comparison)}
    models = {name: _by_split(some) for name, some in by_model(rows).items()}
    notes = [
        note
        for name, some in models.items()
        for split, found in some.items()
        for note in lost_notes((f"{name}, {split}", row) for row in found.values())
    ]
    page = Page(
        title(rows, "Longest sequence and largest batch by split"),
        [height_inches(len(some)) for some in models.values()],
        columns=2,
        notes=notes,
        width_inches=_WIDTH_INCHES,
    )
    for index, (name, some) in enumerate(models.items()):
        for column, searched in enumerate((LENGTH, BATCH)):
            ax = page.panel(index, column)
            found = {split: of[searched] for split, of in some.items() if searched in of}
            bars = [
                _bar(searched, split, found.get(split), ratios, look[strategy(next(iter(of.values())))].color)
                for split, of in some.items()
            ]
            draw_levels(ax, bars)
            name_levels(ax, [] if column else list(some))
            given = GIVEN[searched]
            value = shared(list(found.values()), given.field)
            ax.set_title(name + (f", {given.name} {value}" if value else ""), loc="left")
            ax.set_xlabel(f"Largest {searched.name} ({searched.unit})")
    return page.finish([], lost=[row for row in rows if row["status"] != "ok"])


def _by_split(rows: Sequence[Row]) -> dict[str, dict[Searched, Row]]:
    """The rows by the names of their splits and what they search for; the longest sequence first."""
    found: dict[str, dict[Searched, Row]] = {}
    for searched in (LENGTH, BATCH):
        some = [row for row in rows if searches_for(row, searched.field)]
        for split, row in zip(split_names(some), some, strict=True):
            found.setdefault(split, {})[searched] = row
    return dict(sorted(found.items(), key=lambda entry: -_answer(entry[1].get(LENGTH))))


def _answer(row: Row | None) -> int:
    return 0 if row is None or row["status"] != "ok" else row["measurement"].get("answer") or 0


def _bar(
    searched: Searched, split: str, row: Row | None, ratios: Mapping[str, float | None], color: str
) -> LevelBar:
    gid, answer = f"{searched.field} {split}", _answer(row)
    if row is None:
        return LevelBar([Segment(0, color, gid)], gid, text=" ")
    if not answer:
        return LevelBar([], gid, status=row["status"])
    ratio = ratios.get(row["key"])
    text = number(answer) + (f"  ({number(ratio)}{TIMES})" if ratio is not None else "")
    return LevelBar([Segment(answer, color, gid)], gid, text)


draw = Drawing(__name__, _figure)
