"""Measurements of real machines and ours: the ratio by the measured number, for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from spbench.bench.report.charts import ROLE_COLORS, spec_of
from spbench.bench.report.page import Chart, DataTable, LegendEntry, Panel
from spbench.bench.reproduction.findings import Record, errors_by_role, label_of
from spbench.bench.reproduction.validation import QUANTITY_NAMES, records_by_source

_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
_UNITS = {"memory_gib": "GiB", "time_ms": "ms"}


def measured_chart(records: Sequence[Record]) -> Chart | None:
    """Ours divided by the measured number, a panel for each quantity, colours by role and shapes by who
    measured; None without numbers of ours."""
    lines = [
        {
            "measured by": source.measured_by,
            "quantity": QUANTITY_NAMES.get(record["quantity"], record["quantity"]),
            "unit": _unit(record["quantity"]),
            "what": label_of(record),
            "measured": record["published"],
            "ours": record["reproduced"],
            "relative error": record["relative_error"],
            "role": record["role"],
            "note": record["note"],
        }
        for source, some in records_by_source(records).items()
        for record in some
    ]
    shown = [line for line in lines if line["relative error"] is not None]
    if not shown:
        return None
    quantities = dict.fromkeys(line["quantity"] for line in shown)
    roles = [role for role in ROLE_COLORS if any(line["role"] == role for line in shown)]
    sources = list(dict.fromkeys(line["measured by"] for line in shown))
    panels = []
    for quantity in quantities:
        some = [line for line in shown if line["quantity"] == quantity]
        title = f"{quantity[0].upper()}{quantity[1:]}"
        panels.append(Panel(title, _dots(some, roles, sources)))
    caption = "Ours divided by what real machines measured; 1 is equal"
    shapes = [LegendEntry(f"{_shape_name(at)}: {name}", "hollow") for at, name in enumerate(sources)]
    return Chart(
        "measured",
        caption,
        f"{caption}. {len(shown)} of {len(lines)} numbers have one of ours. {errors_by_role(records)}.",
        {},
        DataTable("measured", caption, lines, sortable=True, percent=("relative error",)),
        panels=panels,
        legend=[*(LegendEntry(role, "filled", ROLE_COLORS[role]) for role in roles), *shapes],
    )


def _unit(quantity: str) -> str:
    return next((unit for ending, unit in _UNITS.items() if quantity.endswith(ending)), "")


def _shape_name(at: int) -> str:
    return _SHAPES[at % len(_SHAPES)].replace("-up", "")


def _dots(lines: Sequence[dict[str, Any]], roles: Sequence[str], sources: Sequence[str]) -> dict[str, Any]:
    """A dot for each number."""
    dots = (
        alt.Chart()
        .mark_point(filled=True, size=55, opacity=0.75)
        .encode(
            x=alt.X(
                "measured:Q",
                title=f"measured ({lines[0]['unit']})",
                scale=alt.Scale(type="log", padding=12),
                axis=alt.Axis(format="~g", tickCount=4, grid=False),
            ),
            y=alt.Y("ratio:Q", title="ours ÷ measured", scale=alt.Scale(zero=False, padding=12)),
            color=alt.Color(
                "role:N", scale=alt.Scale(domain=roles, range=[ROLE_COLORS[r] for r in roles]), legend=None
            ),
            shape=alt.Shape(
                "by:N", scale=alt.Scale(domain=sources, range=_SHAPES[: len(sources)]), legend=None
            ),
            tooltip=[
                alt.Tooltip("by:N", title="measured by"),
                alt.Tooltip("what:N", title="of"),
                alt.Tooltip("measured:Q", format=",.5~g"),
                alt.Tooltip("ours:Q", format=",.5~g"),
                alt.Tooltip("ratio:Q", format=".4f"),
                "role:N",
            ],
        )
    )
    equal = alt.Chart().mark_rule(strokeDash=[4, 3]).encode(y=alt.YDatum(1))
    values = [{**line, "ratio": line["ours"] / line["measured"], "by": line["measured by"]} for line in lines]
    return spec_of(alt.layer(equal, dots).properties(width="container", height=230), values)
