"""Published numbers beside ours, as charts: of a table, of claims and formulas, and of loss curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from spbench.bench.comparison.findings import Record, errors_by_role
from spbench.bench.site.arrangement import ALONG, TOKENS_PER_GPU, arranged, point_of, varying
from spbench.bench.site.charts import ROLE_COLORS, base, legend_of, method_scale
from spbench.bench.site.page import Chart, DataTable, LegendEntry, Panel
from spbench.plots.style import strategy_name

Cells = Mapping[str, Mapping[str, Any]]

#: a cross, for a run that found no room
CROSS = "M-1,-1L1,1M1,-1L-1,1"
#: a y axis whose values differ by more is logarithmic
_LINEAR_RATIO = 25
#: names of settings where readers see them
_NAMES = {
    "gpus": "GPUs",
    "seq_len": "sequence length",
    "dp": "data parallel",
    "pp": "pipeline stages",
    TOKENS_PER_GPU: "tokens per GPU",
}
#: settings that follow from others, or from the place of a row
_UNSHOWN = (TOKENS_PER_GPU, "mesh")
_STATUS_HEIGHT = 22


def table_chart(name: str, title: str, unit: str, records: Sequence[Record], cells: Cells) -> Chart:
    """A published table's numbers beside ours: lines along what the cells differ in most.

    Args:
        unit: of the numbers, with the quantity's name.
        cells: by key, of all records.
    """
    points = [point_of(cells[record["cell"]]) for record in records]
    how = arranged(points)
    different = [n for n in varying(points) if n != "method"]
    shown = [n for n in different if n not in _UNSHOWN]
    values = [_value(record, point, how.along, shown) for record, point in zip(records, points, strict=True)]
    panels = []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for value, point in zip(values, points, strict=True):
        groups.setdefault(tuple(point.get(n) for n in how.panels), []).append(value)
    for key, some in sorted(groups.items(), key=lambda item: [(str(type(v)), v) for v in item[0]]):
        heading = ", ".join(_setting(n, v) for n, v in zip(how.panels, key, strict=True))
        spec = _lines(some, how.along, unit) if how.along else _dots(some, unit)
        panels.append(Panel(heading, spec.to_dict()))
    methods = list(dict.fromkeys(point["method"] for point in points))
    lines = [_line(r, p, shown, unit) for r, p in zip(records, points, strict=True)]
    return Chart(
        name,
        f"{title}: {unit}, published beside ours",
        _alt(title, unit, records, methods, how.along),
        {},
        DataTable(name, f"{title}: {unit}", lines, sortable=len(lines) > 12, percent=("relative error",)),
        panels=panels,
        legend=_legend(methods, records, bool(how.along)),
    )


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
    spec = alt.layer(equal, dots, data=alt.Data(values=values)).properties(
        width="container", height=alt.Step(24)
    )
    return Chart(
        name,
        f"{title}: ours divided by the published number; 1 is equal",
        f"{title}: {len(values)} numbers of ours divided by the published ones. {errors_by_role(records)}.",
        spec.to_dict(),
        DataTable(name, title, lines, sortable=len(lines) > 12, percent=("relative error",)),
        legend=[LegendEntry(role, "filled", ROLE_COLORS[role]) for role in found],
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
        panels=[Panel(f"{kind} loss", _losses(losses, kind, colors).to_dict()) for kind in kinds],
        legend=[LegendEntry(run, "line", color) for run, color in colors.items()],
    )


#: of runs, which are told apart by their order
_RUN_COLORS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494", "#56b4e9")


def _loss_column(run: str, kind: str, kinds: Sequence[str]) -> str:
    return f"{run}: {kind}" if len(kinds) > 1 else run


def _losses(
    losses: Mapping[str, Sequence[Mapping[str, Any]]], kind: str, colors: Mapping[str, str]
) -> alt.Chart:
    """The curves of one loss, each thinner than those below it, so that curves that coincide can be seen."""
    values = [
        {"run": run, "step": step["step"], "loss": step.get(kind)}
        for run, steps in losses.items()
        for step in steps
    ]
    runs = list(losses)
    widths = [1 + 4 * (len(runs) - 1 - at) / max(1, len(runs) - 1) for at in range(len(runs))]
    return (
        base(values)
        .mark_line(opacity=0.8)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("loss:Q", title=f"{kind} loss", scale=alt.Scale(zero=False)),
            color=alt.Color(
                "run:N", scale=alt.Scale(domain=runs, range=[colors[run] for run in runs]), legend=None
            ),
            strokeWidth=alt.StrokeWidth("run:N", scale=alt.Scale(domain=runs, range=widths), legend=None),
            tooltip=["run:N", "step:Q", alt.Tooltip("loss:Q", format=".5f")],
        )
    )


def _value(
    record: Record, point: Mapping[str, Any], along: str | None, shown: Sequence[str]
) -> dict[str, Any]:
    """What a chart has of a record."""
    return {
        "method": strategy_name(point["method"]),
        "strategy": point["method"],
        "x": point[along] if along else None,
        "label": ", ".join([strategy_name(point["method"]), *(_setting(n, point.get(n)) for n in shown)]),
        "published": record["published"],
        "ours": record["reproduced"] if record["status_reproduced"] in ("", "ok") else None,
        "error": record["relative_error"],
        "role": record["role"],
        "published_oom": record["status_published"] == "oom",
        "our_status": record["status_reproduced"],
    }


def _line(record: Record, point: Mapping[str, Any], shown: Sequence[str], unit: str) -> dict[str, Any]:
    """A record as a line of the table behind its chart."""
    return {
        "method": strategy_name(point["method"]),
        **{_NAMES.get(name, name.replace("_", " ")): point.get(name) for name in shown},
        "published": record["published"],
        "ours": record["reproduced"],
        "relative error": record["relative_error"],
        "status published": record["status_published"],
        "status ours": record["status_reproduced"],
        "role": record["role"],
        "note": record["note"],
        "cell": record["cell"],
    }


_TOOLTIP = [
    alt.Tooltip("label:N", title="cell"),
    alt.Tooltip("published:Q", format=",.5~g"),
    alt.Tooltip("ours:Q", format=",.5~g"),
    alt.Tooltip("error:Q", format="+.1%", title="relative error"),
    alt.Tooltip("role:N"),
    alt.Tooltip("our_status:N", title="our status"),
]


def _lines(values: Sequence[Mapping[str, Any]], along: str, unit: str) -> alt.LayerChart:
    """Lines along an axis of powers of two, published dashed and hollow, ours solid and filled."""
    places = sorted({value["x"] for value in values})
    text = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'K' : datum.value"
    x = alt.X(
        "x:Q",
        title=ALONG[along],
        scale=alt.Scale(type="log", base=2, nice=False, padding=14),
        axis=alt.Axis(values=places, labelExpr=text, labelOverlap="greedy", grid=False),
    )
    color = alt.Color("method:N", scale=_scale(values), legend=None)

    def layer(mark: alt.Chart, column: str) -> alt.Chart:
        y = alt.Y(f"{column}:Q", title=_wrapped(unit), scale=_magnitude(values), axis=_AMOUNTS)
        return mark.encode(x=x, y=y, color=color, tooltip=_TOOLTIP)

    layers = [
        layer(alt.Chart().mark_line(strokeWidth=2), "ours"),
        layer(alt.Chart().mark_point(filled=True, size=45, opacity=1), "ours"),
    ]
    if any(value["published"] is not None for value in values):
        layers += [
            layer(alt.Chart().mark_line(strokeWidth=1.5, strokeDash=[4, 3]), "published"),
            layer(alt.Chart().mark_point(filled=False, size=95, strokeWidth=1.6), "published"),
        ]
    layers += _lost(values, x, color)
    return alt.layer(*layers, data=alt.Data(values=list(values))).properties(width="container", height=250)


def _lost(values: Sequence[Mapping[str, Any]], x: alt.X, color: alt.Color) -> Iterator[alt.Chart]:
    """Crosses at the panel's top where there was no number: ours at the very top, published ones below."""
    for place, test, found in (
        (6, "datum.our_status != '' && datum.our_status != 'ok'", any(_is_lost(v) for v in values)),
        (_STATUS_HEIGHT, "datum.published_oom", any(v["published_oom"] for v in values)),
    ):
        if found:
            marks = alt.Chart().mark_point(shape=CROSS, size=60, strokeWidth=2.5 if place == 6 else 1.2)
            yield marks.encode(x=x, y=alt.value(place), color=color, tooltip=_TOOLTIP).transform_filter(test)


def _dots(values: Sequence[Mapping[str, Any]], unit: str) -> alt.LayerChart:
    """A row for each cell: the published number hollow, ours filled, and the distance between them."""
    y = alt.Y(
        "label:N",
        title=None,
        sort=list(dict.fromkeys(v["label"] for v in values)),
        axis=alt.Axis(labelLimit=260),
    )
    color = alt.Color("method:N", scale=_scale(values), legend=None)

    def layer(mark: alt.Chart, column: str) -> alt.Chart:
        x = alt.X(f"{column}:Q", title=unit, scale=_magnitude(values), axis=_AMOUNTS)
        return mark.encode(x=x, y=y, color=color, tooltip=_TOOLTIP)

    layers = [layer(alt.Chart().mark_point(filled=True, size=60, opacity=1), "ours")]
    if any(value["published"] is not None for value in values):
        both = "isValid(datum.published) && isValid(datum.ours)"
        layers += [
            layer(alt.Chart().mark_rule(), "ours").encode(x2="published:Q").transform_filter(both),
            layer(alt.Chart().mark_point(filled=False, size=110, strokeWidth=1.6), "published"),
        ]
    if any(_is_lost(value) for value in values):
        lost = alt.Chart().mark_point(shape=CROSS, size=60, strokeWidth=2.5)
        layers.append(
            lost.encode(x=alt.value(6), y=y, color=color, tooltip=_TOOLTIP).transform_filter(
                "datum.our_status != '' && datum.our_status != 'ok'"
            )
        )
    return alt.layer(*layers, data=alt.Data(values=list(values))).properties(
        width="container", height=alt.Step(24)
    )


_AMOUNTS = alt.Axis(format="~s", tickCount=6)


def _is_lost(value: Mapping[str, Any]) -> bool:
    return value["our_status"] not in ("", "ok")


def _magnitude(values: Sequence[Mapping[str, Any]]) -> alt.Scale:
    """A scale of the numbers: logarithmic if they differ much, else from zero."""
    numbers = [v[k] for v in values for k in ("published", "ours") if v[k]]
    if numbers and max(numbers) > _LINEAR_RATIO * min(numbers) > 0:
        return alt.Scale(type="log", nice=True)
    return alt.Scale(zero=True)


def _scale(values: Sequence[Mapping[str, Any]]) -> alt.Scale:
    return method_scale(dict.fromkeys(v["strategy"] for v in values))


def _wrapped(text: str) -> list[str]:
    name, opening, rest = text.partition(" (")
    return [name, opening.strip() + rest] if len(text) > 34 and opening else [text]


def _legend(methods: Sequence[str], records: Sequence[Record], lines: bool) -> list[LegendEntry]:
    entries = [*legend_of(methods, "line" if lines else "filled"), LegendEntry("ours", "filled")]
    if any(record["published"] is not None for record in records):
        entries.append(LegendEntry("published", "hollow"))
    lost = {r["status_reproduced"] for r in records} - {"", "ok"}
    if lost or any(record["status_published"] == "oom" for record in records):
        words = {"oom": "out of memory"}
        text = " or ".join(sorted(words.get(status, status) for status in lost or {"oom"}))
        both = lines and any(record["status_published"] == "oom" for record in records)
        where = ": thick ours, thin below it published" if both else ""
        entries.append(LegendEntry(text + where, "cross"))
    return entries


def _alt(title: str, unit: str, records: Sequence[Record], methods: Sequence[str], along: str | None) -> str:
    numbers = sum(record["published"] is not None for record in records)
    ran_out = sum(record["status_reproduced"] == "oom" for record in records)
    text = f"{title}: {unit} of {', '.join(map(strategy_name, methods))}"
    text += f" along {ALONG[along]}. " if along else ". "
    text += f"{len(records)} cells, {numbers} with a published number: {errors_by_role(records)}."
    return text + (f" {ran_out} of ours ran out of memory." if ran_out else "")


def _setting(name: str, value: Any) -> str:
    """A setting and its value, as text."""
    if name in ("model", "cluster", "engine", "precision", "variant", "backend"):
        return str(value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} GPUs" if name == "gpus" else f"{_NAMES.get(name, name.replace('_', ' '))} {text}"
