"""Figure of placements of packed documents on ranks: how even the work is, and what that makes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean

from pandas import DataFrame

from spbench.plots.axes import length_text
from spbench.plots.bars import Bar, Segment, draw_levels, levels_inches
from spbench.plots.grid import Drawing, Panel, PanelGrid
from spbench.plots.lines import measured
from spbench.plots.series import Row, gpus, grouped
from spbench.plots.style import category_colors, number

Value = Callable[[Row], float | None]


def placement_imbalance(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """For each length and number of GPUs the imbalance of each variant's rows, above their step times: the
    means of several draws of documents, and in parentheses their ranges."""
    colors = category_colors(row["cell"]["variant"] for row in rows)
    order = list(colors)

    def place(row: Row) -> tuple[int, int, int]:
        return row["cell"]["seq_len"], gpus(row), order.index(row["cell"]["variant"])

    facets = [
        [
            _panel(some, colors, name, "Heaviest rank over mean", measured("imbalance")),
            _panel(some, colors, name, "Step (ms)", measured("step_time_s", 1e-3)),
        ]
        for name, some in grouped(sorted(rows, key=place), _facet).items()
    ]
    lost = [row for row in rows if row["status"] != "ok"]
    return PanelGrid("Packed documents on a ring, by placement", lost=lost).add(facets, abreast=2)


def _facet(row: Row) -> str:
    return f"{length_text(row['cell']['seq_len'])} tokens, {gpus(row)} GPUs"


def _panel(rows: Sequence[Row], colors: Mapping[str, str], title: str, label: str, value: Value) -> Panel:
    bars, names = [], []
    for name, draws in grouped(rows, lambda row: row["cell"]["variant"]).items():
        values = [found for row in draws if (found := value(row)) is not None]
        gid = f"{label} {title} {name}"
        segments = [Segment(mean(values), colors[name], gid)] if values else []
        status = next((row["status"] for row in draws if row["status"] != "ok"), "ok")
        bars.append(Bar(segments, gid, spread(values), status))
        names.append(name.replace("_", " "))
    return Panel(partial(draw_levels, bars=bars, names=names), title, label, inches=levels_inches(len(bars)))


def spread(values: Sequence[float]) -> str:
    """Their mean, and in parentheses their range where they differ in what is shown."""
    if not values:
        return ""
    least, most = number(min(values)), number(max(values))
    return number(mean(values)) + (f" ({least} to {most})" if least != most else "")


draw = Drawing("placement_imbalance", placement_imbalance)
