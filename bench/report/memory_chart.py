"""The drawing of what holds a rank's memory at its peak, of several strategies."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt

from spbench.bench.meters.memory import CATEGORIES
from spbench.bench.report.charts import spec_of
from spbench.bench.report.page import Chart, DataTable, LegendEntry
from spbench.bench.report.strategy_numbers import memory_lines
from spbench.bench.sweep.results import Row
from spbench.plots.style import strategy_name

#: of :data:`CATEGORIES`, in their order
_COLORS = ("#4477aa", "#66aadd", "#228877", "#999999", "#ee8833", "#cc3355", "#aa77bb", "#c2a000")
#: pixels of a bar and the space around it
_BAR = 34


def memory_chart(rows: Mapping[str, Row], strategy: str, at: str) -> Chart:
    """The memory of all strategies, one of which is highlighted.

    Args:
        rows: of a cell of each strategy.
        at: the model and the shape, in words.
    """
    lines = [
        {
            "strategy": strategy_name(line["strategy"]),
            "category": _words(line["category"]),
            "GiB": line["GiB"],
            "this": line["strategy"] == strategy,
        }
        for line in memory_lines(rows)
    ]
    held = {line["category"] for line in lines}
    colors = {
        _words(name): color for name, color in zip(CATEGORIES, _COLORS, strict=True) if _words(name) in held
    }
    names = list(dict.fromkeys(line["strategy"] for line in lines))
    order = {category: place for place, category in enumerate(colors)}
    values = [{**line, "order": order[line["category"]]} for line in lines]
    chart = (
        alt.Chart(width="container", height=_BAR * len(names))
        .mark_bar(height={"band": 0.75})
        .encode(
            x=alt.X("GiB:Q", title="GiB at the peak of a rank", stack="zero"),
            y=alt.Y("strategy:N", sort=names, title=None),
            color=alt.Color(
                "category:N", legend=None, scale=alt.Scale(domain=[*colors], range=[*colors.values()])
            ),
            order="order:Q",
            opacity=alt.condition("datum.this", alt.value(1.0), alt.value(0.45)),
            tooltip=["strategy:N", "category:N", alt.Tooltip("GiB:Q", format=".3f")],
        )
    )
    totals = {name: sum(line["GiB"] for line in lines if line["strategy"] == name) for name in names}
    seen = ", ".join(f"{name} {total:.3g}" for name, total in totals.items())
    return Chart(
        "memory",
        f"Memory of the rank that needs most, at its peak, by what holds it: {at}",
        f"Stacked bars, in GiB: {seen}. {strategy_name(strategy)} is highlighted.",
        spec_of(chart, values),
        DataTable(
            "memory-numbers",
            "Bytes held at the peak, in GiB",
            [{key: line[key] for key in ("strategy", "category", "GiB")} for line in lines],
        ),
        legend=[LegendEntry(category, "filled", color) for category, color in colors.items()],
    )


def _words(category: str) -> str:
    return category.replace("_", " ")
