"""A published table beside ours, as a chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from spbench.bench.report.arrangement import ALONG, TOKENS_PER_GPU, arranged, point_of, varying
from spbench.bench.report.charts import ROW_HEIGHT, legend_of, method_scale, spec_of
from spbench.bench.report.page import Chart, DataTable, LegendEntry, Panel
from spbench.bench.reproduction.findings import Record, errors_by_role, label_of
from spbench.plots.axes import length_text
from spbench.plots.style import strategy_name

Drawn = alt.LayerChart | alt.FacetChart
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
    shown = [name for name in varying(points) if name != "method" and name not in _UNSHOWN]
    values = [_value(record, point, how.along, shown) for record, point in zip(records, points, strict=True)]
    panels = []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for value, point in zip(values, points, strict=True):
        groups.setdefault(tuple(point.get(n) for n in how.panels), []).append(value)
    for key, some in sorted(groups.items(), key=lambda item: [(str(type(v)), v) for v in item[0]]):
        heading = ", ".join(_setting(n, v) for n, v in zip(how.panels, key, strict=True))
        drawn = _lines(some, how.along, unit) if how.along else _dots(some, unit)
        panels.append(Panel(heading, spec_of(drawn, some)))
    methods = list(dict.fromkeys(point["method"] for point in points))
    lines = [_line(r, p, shown) for r, p in zip(records, points, strict=True)]
    stated = any(record["published"] is not None for record in records)
    return Chart(
        name,
        f"{title}: {unit}, {'published beside ours' if stated else 'ours'}",
        _alt(title, unit, records, methods, how.along),
        {},
        DataTable(name, f"{title}: {unit}", lines, sortable=len(lines) > 12, percent=("relative error",)),
        panels=panels,
        legend=_legend(methods, records, bool(how.along)),
    )


def _value(
    record: Record, point: Mapping[str, Any], along: str | None, shown: Sequence[str]
) -> dict[str, Any]:
    """What a chart has of a record."""
    return {
        "method": strategy_name(point["method"]),
        "strategy": point["method"],
        "x": point[along] if along else None,
        "label": ", ".join(
            [
                strategy_name(point["method"]),
                *(_setting(n, point[n]) for n in shown if point.get(n) is not None),
            ]
        ),
        "published": record["published"],
        "ours": record["reproduced"] if record["status_reproduced"] in ("", "ok") else None,
        "error": record["relative_error"],
        "role": record["role"],
        "published_oom": record["status_published"] == "oom",
        "our_status": record["status_reproduced"],
    }


def _line(record: Record, point: Mapping[str, Any], shown: Sequence[str]) -> dict[str, Any]:
    """A record as a line of the table behind its chart."""
    return {
        "method": strategy_name(point["method"]),
        **{_NAMES.get(name, name.replace("_", " ")): point.get(name) for name in shown},
        **({"measured": label_of(record)} if label_of(record) else {}),
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


def _lines(values: Sequence[Mapping[str, Any]], along: str, unit: str) -> Drawn:
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

    layers = []
    if any(value["ours"] is not None for value in values):
        layers += [
            layer(alt.Chart().mark_line(strokeWidth=2), "ours"),
            layer(alt.Chart().mark_point(filled=True, size=45, opacity=1), "ours"),
        ]
    if any(value["published"] is not None for value in values):
        layers += [
            layer(alt.Chart().mark_line(strokeWidth=1.5, strokeDash=[4, 3]), "published"),
            layer(alt.Chart().mark_point(filled=False, size=95, strokeWidth=1.6), "published"),
        ]
    layers += _lost(values, x, color)
    return alt.layer(*layers).properties(width="container", height=250)


def _lost(values: Sequence[Mapping[str, Any]], x: alt.X, color: alt.Color) -> Iterator[alt.Chart]:
    """Crosses at the panel's top where there was no number: ours at the very top, published ones below."""
    for place, test, found in (
        (6, "datum.our_status != '' && datum.our_status != 'ok'", any(_is_lost(v) for v in values)),
        (_STATUS_HEIGHT, "datum.published_oom", any(v["published_oom"] for v in values)),
    ):
        if found:
            marks = alt.Chart().mark_point(shape=CROSS, size=60, strokeWidth=2.5 if place == 6 else 1.2)
            yield marks.encode(x=x, y=alt.value(place), color=color, tooltip=_TOOLTIP).transform_filter(test)


def _dots(values: Sequence[Mapping[str, Any]], unit: str) -> Drawn:
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
    if any(None not in (value["published"], value["ours"]) for value in values):
        both = "isValid(datum.published) && isValid(datum.ours)"
        between = layer(alt.Chart().mark_rule(), "ours").encode(x2="published:Q").transform_filter(both)
        layers.insert(0, between)
    if any(value["published"] is not None for value in values):
        layers.append(layer(alt.Chart().mark_point(filled=False, size=110, strokeWidth=1.6), "published"))
    if any(_is_lost(value) for value in values):
        lost = alt.Chart().mark_point(shape=CROSS, size=60, strokeWidth=2.5)
        layers.append(
            lost.encode(x=alt.value(6), y=y, color=color, tooltip=_TOOLTIP).transform_filter(
                "datum.our_status != '' && datum.our_status != 'ok'"
            )
        )
    return alt.layer(*layers).properties(
        width="container", height=ROW_HEIGHT * len({value["label"] for value in values})
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
    words = _NAMES.get(name, name.replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if name in ("seq_len", TOKENS_PER_GPU) and value:
        text = length_text(int(value))
    return f"{text} GPUs" if name == "gpus" else f"{words} {text}"
