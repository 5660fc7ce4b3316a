"""Claims and formulas: ours divided by the published number."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from spbench.bench.report.charts import ROLE_COLORS, ROW_HEIGHT, spec_of
from spbench.bench.report.page import Chart, DataTable, LegendEntry
from spbench.bench.reproduction.findings import Record, errors_by_role


def ratio_chart(name: str, title: str, records: Sequence[Record]) -> Chart:
    """Ours divided by the published number, for claims and formulas: 1 is equal."""
    lines = [
        {
            "name": record["table"],
            "variant": record["variant"],
            "quantity": record["quantity"],
            "published": record["published"],
            "ours": record["reproduced"],
            "relative error": record["relative_error"],
            "role": record["role"],
            "note": record["note"],
            "cell": record["cell"],
        }
        for record in records
    ]
    values = [
        {
            # a formula is evaluated at several cells
            "name": line["name"].split(",")[0] if line["role"] == "formula" else line["name"],
            "ratio": line["ours"] / line["published"],
            "role": line["role"],
            "published": line["published"],
            "ours": line["ours"],
            "label": line["cell"],
        }
        for line in lines
        if line["published"] and line["ours"] is not None
    ]
    found = [role for role in ROLE_COLORS if any(v["role"] == role for v in values)]
    names = list(dict.fromkeys(v["name"] for v in values))
    dots = (
        alt.Chart()
        .mark_point(filled=True, size=70, opacity=0.9)
        .encode(
            x=alt.X("ratio:Q", title="ours ÷ published", scale=alt.Scale(zero=False, padding=12)),
            y=alt.Y("name:N", title=None, sort=names),
            color=alt.Color(
                "role:N", scale=alt.Scale(domain=found, range=[ROLE_COLORS[r] for r in found]), legend=None
            ),
            tooltip=[
                "name:N",
                alt.Tooltip("label:N", title="cell"),
                alt.Tooltip("published:Q", format=",.5~g"),
                alt.Tooltip("ours:Q", format=",.5~g"),
                alt.Tooltip("ratio:Q", format=".3f"),
                "role:N",
            ],
        )
    )
    equal = alt.Chart().mark_rule(strokeDash=[4, 3]).encode(x=alt.XDatum(1))
    drawn = alt.layer(equal, dots).properties(width="container", height=ROW_HEIGHT * len(names))
    return Chart(
        name,
        f"{title}: ours divided by the published number; 1 is equal",
        f"{title}: {len(values)} numbers of ours divided by the published ones. {errors_by_role(records)}.",
        spec_of(drawn, values),
        DataTable(name, title, lines, sortable=len(lines) > 12, percent=("relative error",)),
        legend=[LegendEntry(role, "filled", ROLE_COLORS[role]) for role in found],
    )
