"""Which method is the best at each sequence length and number of GPUs, of those that were measured alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from spbench.bench.tools.report.charts import legend_of, method_scale, selected, spec_of
from spbench.bench.tools.report.gathered import CellResult
from spbench.bench.tools.report.page import Chart, DataTable, LegendEntry, Selector
from spbench.bench.tools.report.published_tables import point_of
from spbench.bench.units import three_digits
from spbench.plots.axes import length_text
from spbench.plots.style import contrast, looks, method_color, number, strategy_name


@dataclass(frozen=True)
class Question:
    """What is asked of cells, and what the answer is.

    Attributes:
        title: as readers choose it.
        field: of the measurement.
        unit: of the shown value, which is the measured one divided by ``divisor``.
        searched: only searches for this quantity; empty: only cells that measure a step.
    """

    title: str
    field: str
    unit: str
    divisor: float = 1
    bigger: bool = True
    searched: str = ""


BY_LENGTH = (
    Question("fastest", "tokens_per_s", "tokens/s"),
    Question("smallest peak memory", "peak_memory_bytes", "GiB", 2**30, bigger=False),
    Question("largest batch that fits", "answer", "sequences", searched="batch"),
)
BY_BATCH = (Question("longest sequence that fits", "answer", "tokens", searched="seq_len"),)

#: contrast of a colour against white, from which white is read better on it than black
_DARK = 4.58
#: cells are alike that share these and their sizes, beside their place
_ALIKE = ("batch", "precision", "variant", "engine", "step")

#: a cell and its settings
_Entry = tuple[CellResult, Mapping[str, Any]]


def best_chart(
    name: str, caption: str, cells: Sequence[CellResult], questions: Sequence[Question], along: str
) -> Chart | None:
    """A heat map of the best method over GPUs and ``along``, by question, model and cluster.

    Args:
        along: seq_len or batch.

    Returns None if no cell answers any of the questions.
    """
    lines = [line for question in questions for line in _best(cells, question, along)]
    if not lines:
        return None
    selectors = [_selector(lines, field) for field in ("metric", "model", "cluster")]
    selectors = [selector for selector in selectors if len(selector.options) > 1]
    methods = sorted({line["strategy"] for line in lines if line["strategy"]})
    entries = legend_of(list(looks(methods)), "square")
    if any(line["out of memory"] for line in lines):
        entries.append(LegendEntry("a method ran out of memory there", "cross"))
    axis = "sequence length (tokens)" if along == "seq_len" else "batch (sequences)"
    drawn = selected(_heat_map(methods, axis), selectors)
    heads = [head for head in lines[0] if head != "strategy"]
    return Chart(
        name,
        caption,
        f"{caption}. {len(lines)} places with {len(methods)} best methods; the table has the numbers.",
        spec_of(drawn, [_value(line, along) for line in lines]),
        DataTable(name, caption, lines, heads),
        selectors=selectors,
        legend=entries,
    )


def _selector(lines: Sequence[Mapping[str, Any]], field: str) -> Selector:
    """The values of a field, metrics in their order, others by how many places they have a comparison of."""
    values = dict.fromkeys(str(line[field]) for line in lines)
    compared = Counter(str(line[field]) for line in lines if line["compared with"])
    ordered = values if field == "metric" else sorted(values, key=lambda value: (-compared[value], value))
    return Selector(field, field, [(value, value) for value in ordered])


def _best(cells: Sequence[CellResult], question: Question, along: str) -> Iterator[dict[str, Any]]:
    """A line for each place: the best method, and what it was compared with."""
    places: dict[tuple[Any, ...], list[_Entry]] = {}
    for cell in cells:
        searched = (cell.row["cell"].get("search") or {}).get("quantity", "")
        point = point_of(cell.row["cell"])
        if cell.row["status"] not in ("ok", "oom") or point[along] is None:
            continue
        if searched == question.searched or (not question.searched and question.field == "tokens_per_s"):
            key = (point["model"], point["cluster"], point["gpus"], point[along])
            places.setdefault(key, []).append((cell, point))
    for (model, cluster, gpus, place), entries in sorted(places.items()):
        alike = _most_compared(entries, question)
        values = _by_method(alike, question)
        ran_out = {point["method"] for cell, point in alike if cell.row["status"] == "oom"}
        lost = sorted(ran_out - values.keys())
        if not values and any(cell.row["status"] == "ok" for cell, _ in entries):
            continue  # nothing was measured of what is asked
        ranked = sorted(values.items(), key=lambda item: item[1], reverse=question.bigger)
        cell, settings = alike[0]
        yield {
            "metric": question.title,
            "model": model,
            "cluster": cluster,
            "GPUs": gpus,
            "sequence length": place if along == "seq_len" else None,
            "batch": settings["batch"] if settings["batch"] is not None else "largest that fits",
            "precision": settings["precision"],
            "sizes": ", ".join(f"{name} {value}" for name, value in _sizes(cell)),
            "best method": strategy_name(ranked[0][0]) if ranked else None,
            "value": ranked[0][1] / question.divisor if ranked else None,
            "unit": question.unit,
            "compared with": ", ".join(strategy_name(method) for method, _ in ranked[1:]),
            "second": ranked[1][1] / question.divisor if len(ranked) > 1 else None,
            "out of memory": ", ".join(map(strategy_name, lost)),
            "strategy": ranked[0][0] if ranked else "",
        }


def _most_compared(entries: Sequence[_Entry], question: Question) -> list[_Entry]:
    """The entries that are alike: of the whole model if there are any, then with the most methods, then with
    the largest batch."""
    groups: dict[tuple[Any, ...], list[_Entry]] = {}
    for cell, point in entries:
        if cell.row["status"] == "oom" or cell.row["measurement"].get(question.field) is not None:
            key = (_sizes(cell), *(point.get(name) for name in _ALIKE))
            groups.setdefault(key, []).append((cell, point))
    if not groups:
        return list(entries)

    def rank(item: tuple[tuple[Any, ...], list[_Entry]]) -> tuple[Any, ...]:
        (sizes, batch, *others), some = item
        methods = len(_by_method(some, question)), len({point["method"] for _, point in some})
        return -len(sizes), *methods, batch or 0, str((sizes, others))

    return max(groups.items(), key=rank)[1]


def _sizes(cell: CellResult) -> tuple[tuple[str, Any], ...]:
    """The options that make the model another one, as fewer layers do: numbers and flags. Words choose how
    it is computed, which methods may differ in."""
    options = cell.row["cell"].get("model_options") or {}
    return tuple((name, value) for name, value in sorted(options.items()) if not isinstance(value, str))


def _by_method(entries: Sequence[_Entry], question: Question) -> dict[str, float]:
    """The best value of each method that has any."""
    better = max if question.bigger else min
    best: dict[str, float] = {}
    for cell, point in entries:
        value = cell.row["measurement"].get(question.field) if cell.row["status"] == "ok" else None
        if value is not None:
            best[point["method"]] = better(best.get(point["method"], value), value)
    return best


def _value(line: Mapping[str, Any], along: str) -> dict[str, Any]:
    """What the heat map has of a line."""
    value = line["value"]
    place = line["sequence length"] if along == "seq_len" else line["batch"]
    return {
        **{name: line[name] for name in ("metric", "model", "cluster", "sizes")},
        "gpus": line["GPUs"],
        "place": place,
        "label": length_text(place) if along == "seq_len" else str(place),
        "method": line["best method"],
        "text": "" if value is None else _short(value),
        "ink": "#000" if line["strategy"] and contrast(method_color(line["strategy"])) < _DARK else "#fff",
        "shown": "none" if value is None else f"{_shown(value, line['unit'])} {line['unit']}",
        "batch": str(line["batch"]),
        "second": line["compared with"],
        "lost": line["out of memory"],
    }


def _shown(value: float, unit: str) -> str:
    """A value with three digits where it is a rate, else with all of its whole part."""
    return three_digits(value) if unit.endswith("/s") else number(value)


def _short(value: float) -> str:
    for divisor, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * divisor:
            return f"{value / divisor:.0f}{suffix}"
        if value >= divisor:
            return f"{value / divisor:.1f}{suffix}"
    return f"{value:.3g}"


def _heat_map(methods: Sequence[str], axis: str) -> alt.LayerChart | alt.FacetChart:
    """Places coloured by their best method, each with its value; crosses where a method ran out of memory."""
    told = {
        "method:N": "best method",
        "shown:N": "value",
        "gpus:O": "GPUs",
        "label:N": axis,
        "batch:N": "batch",
        "sizes:N": "sizes",
        "second:N": "compared with",
        "lost:N": "out of memory",
    }
    base = alt.Chart().encode(
        x=alt.X(
            "label:O",
            title=axis,
            sort=alt.EncodingSortField("place", op="min"),
            scale=alt.Scale(paddingInner=0.05, paddingOuter=0),
            axis=alt.Axis(labelAngle=0, labelOverlap="greedy"),
        ),
        y=alt.Y("gpus:O", title="GPUs", sort="descending", scale=alt.Scale(paddingInner=0.08)),
        tooltip=[alt.Tooltip(field, title=title) for field, title in told.items()],
    )
    color = alt.Color("method:N", scale=method_scale(methods), legend=None)
    ink = alt.Color("ink:N", scale=None)
    best = base.transform_filter("isValid(datum.method)").mark_rect(cornerRadius=3).encode(color=color)
    none = base.transform_filter("!isValid(datum.method)")
    none = none.mark_rect(cornerRadius=3, color="#8886", stroke="#888")
    wide = alt.ExprRef("width > 420 ? 1 : 0")
    text = base.mark_text(fontSize=12, fontWeight=600, opacity=wide).encode(text="text:N", color=ink)
    cross: dict[str, Any] = {"shape": "M-1,-1L1,1M1,-1L-1,1", "size": 35, "strokeWidth": 2, "yOffset": -11}
    lost = base.transform_filter("datum.lost != ''").mark_point(**cross).encode(color=ink)
    return alt.layer(best, none, text, lost).properties(
        # how many rows there are depends on what readers choose
        width="container",
        usermeta={"rows": {"field": "gpus", "height": 42}},
    )
