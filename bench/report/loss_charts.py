"""Losses of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from spbench.bench.report.charts import spec_of
from spbench.bench.report.page import Chart, DataTable, LegendEntry, Panel

#: of runs, which are told apart by their order
_RUN_COLORS = (
    *("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161"),
    *("#949494", "#56b4e9", "#8c6bb1", "#7f7f00", "#1b7f8c", "#b2182b"),
)


def loss_chart(name: str, title: str, losses: Mapping[str, Sequence[Mapping[str, Any]]]) -> Chart:
    """Losses of training runs by step, a panel for each loss.

    Args:
        losses: of each run, by its name: of each step ``step`` and every loss.
    """
    kinds = list(dict.fromkeys(k for steps in losses.values() for s in steps for k in s if k != "step"))
    colors = dict(zip(losses, _RUN_COLORS * len(losses), strict=False))
    by_step: dict[int, dict[str, Any]] = {}
    for run, steps in losses.items():
        for step in steps:
            line = by_step.setdefault(step["step"], {"step": step["step"]})
            line |= {_loss_column(run, kind, kinds): step.get(kind) for kind in kinds}
    columns = ["step", *(_loss_column(run, kind, kinds) for run in losses for kind in kinds)]
    rows = [{column: line.get(column) for column in columns} for _, line in sorted(by_step.items())]
    return Chart(
        name,
        f"{title}: losses by step",
        f"Losses of {len(losses)} training runs over {len(rows)} steps; equal runs have the same curve.",
        {},
        DataTable(name, f"{title}: losses by step", rows, columns, sortable=True),
        panels=[Panel(f"{kind} loss", _losses(losses, kind, colors)) for kind in kinds],
        legend=[LegendEntry(run, "line", color) for run, color in colors.items()],
    )


def _loss_column(run: str, kind: str, kinds: Sequence[str]) -> str:
    return f"{run}: {kind}" if len(kinds) > 1 else run


def _losses(
    losses: Mapping[str, Sequence[Mapping[str, Any]]], kind: str, colors: Mapping[str, str]
) -> dict[str, Any]:
    """The curves of one loss."""
    values = [
        {"run": run, "step": step["step"], "loss": step.get(kind)}
        for run, steps in losses.items()
        for step in steps
    ]
    runs = list(losses)
    lines = (
        alt.Chart()
        .mark_line(opacity=0.8, strokeWidth=1.5)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("loss:Q", title=f"{kind} loss", scale=alt.Scale(zero=False)),
            color=alt.Color(
                "run:N", scale=alt.Scale(domain=runs, range=[colors[run] for run in runs]), legend=None
            ),
            tooltip=["run:N", "step:Q", alt.Tooltip("loss:Q", format=".5f")],
        )
        .properties(width="container", height=260)
    )
    return spec_of(lines, values)
