"""The longest sequence and the largest batch of each split over the axes of a mesh, beside a baseline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from pandas import DataFrame

from spbench.plots.bars import Bar, Segment, draw_levels, levels_inches
from spbench.plots.claims import claims_of
from spbench.plots.drawing import Drawing
from spbench.plots.grid import Drawn, Panel, PanelGrid
from spbench.plots.largest import BATCH, GIVEN, LENGTH, Searched
from spbench.plots.marks import lost_notes
from spbench.plots.series import Row, by_model, searches_for, shared, strategy, title
from spbench.plots.splits import split_names
from spbench.plots.style import TIMES, method_color, number


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A row for each model, of a panel for the longest sequence and one for the largest batch, with the
    splits from the longest sequence to the shortest; a bar's ratio to the baseline, where the comparison has
    one, stands at its end."""
    rows = [row for row in rows if any(searches_for(row, searched.field) for searched in (LENGTH, BATCH))]
    ratios = {claim.numerator: claim.ours for claim in claims_of(comparison)}
    models = {name: _by_split(some) for name, some in by_model(rows).items()}
    notes = [
        note
        for name, some in models.items()
        for split, found in some.items()
        for note in lost_notes((f"{name}, {split}", row) for row in found.values())
    ]
    lost = [row for row in rows if row["status"] != "ok"]
    grid = PanelGrid(title(rows, "Longest sequence and largest batch by split"), notes, lost, page_only=True)
    for name, some in models.items():
        grid.add([[_panel(name, some, searched, ratios)] for searched in (LENGTH, BATCH)])
    return grid


def _panel(
    name: str,
    splits: Mapping[str, Mapping[Searched, Row]],
    searched: Searched,
    ratios: Mapping[str, float | None],
) -> Panel:
    given = GIVEN[searched]
    value = shared([of[searched] for of in splits.values() if searched in of], given.field)
    bars = [
        _bar(searched, split, of.get(searched), ratios, method_color(strategy(next(iter(of.values())))))
        for split, of in splits.items()
    ]

    def draw_panel(ax: Axes) -> Drawn:
        return draw_levels(ax, bars, list(splits))

    return Panel(
        draw_panel,
        name + (f", {given.name} {value}" if value else ""),
        f"Largest {searched.name} ({searched.unit})",
        scale=name,
        inches=levels_inches(len(bars)),
    )


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
) -> Bar:
    gid, answer = f"{searched.field} {split}", _answer(row)
    if row is None:
        return Bar([Segment(0, color, gid)], gid, text=" ")
    if not answer:
        return Bar([], gid, status=row["status"])
    ratio = ratios.get(row["key"])
    text = number(answer) + (f"  ({number(ratio)}{TIMES})" if ratio is not None else "")
    return Bar([Segment(answer, color, gid)], gid, text)


draw = Drawing(__name__, _grid)
