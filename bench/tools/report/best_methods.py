"""Which method is the best at each sequence length and number of GPUs, of those that were measured alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.row import Row
from spbench.bench.tools.report.gathered import CellResult
from spbench.bench.tools.report.page import DataTable, Drawing
from spbench.bench.tools.report.svg import AXIS, Svg
from spbench.bench.units import GIB, three_digits
from spbench.plots.series import gpus, grouped, settings, strategy
from spbench.plots.style import (
    contrast,
    length_text,
    looks,
    method_color,
    model_name,
    number,
    strategy_name,
    tick_texts,
)


@dataclass(frozen=True)
class MethodQuestion:
    """What is asked of cells, and what the answer is.

    Attributes:
        title: as readers see it.
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
    MethodQuestion("fastest", "tokens_per_s", "tokens/s"),
    MethodQuestion("smallest peak memory", "peak_memory_bytes", "GiB", GIB, bigger=False),
    MethodQuestion("largest batch that fits", "answer", "sequences", searched="batch"),
)
BY_BATCH = (MethodQuestion("longest sequence that fits", "answer", "tokens", searched="seq_len"),)

#: contrast of a colour against white, from which white is read better on it than black
_DARK = 4.58
#: cells are alike that share these and their sizes, beside their place
_ALIKE = ("batch", "precision", "variant", "engine", "step")
#: pixels of a place in a heat map
_WIDTH, _HEIGHT, _LEFT = 64, 34, 70

#: a row and its settings
_Entry = tuple[Row, Mapping[str, Any]]


def best_drawing(
    name: str, caption: str, cells: Sequence[CellResult], questions: Sequence[MethodQuestion], along: str
) -> Drawing | None:
    """Heat maps of the best method over GPUs and ``along``, one for each question, model and cluster
    with several places where methods were compared, the most compared first. The table has all places.

    Args:
        along: seq_len or batch.

    Returns None if no cell answers any of the questions.
    """
    lines = [line for question in questions for line in _best(cells, question, along)]
    if not lines:
        return None
    place = "sequence length" if along == "seq_len" else "batch"
    title = "{metric} ({unit}): {name} on {cluster}"
    maps = grouped(lines, lambda line: title.format(**line, name=model_name(line["model"])))
    compared = {title: sum(bool(line["compared with"]) for line in some) for title, some in maps.items()}
    # a map of one place says no more than its line in the table
    chosen = sorted((t for t in maps if compared[t] and len(maps[t]) > 1), key=lambda title: -compared[title])
    methods = {line["strategy"] for title in chosen for line in maps[title] if line["strategy"]}
    heads = [head for head in lines[0] if head != "strategy"]
    return Drawing(
        f"{caption}. {len(lines)} places; the table has the numbers.",
        [(f"{title}, GPUs by {place}", _heat_map(maps[title], place)) for title in chosen],
        DataTable(name, caption, lines, heads, sortable=True),
        {strategy_name(method): look.color for method, look in looks(methods).items()},
    )


def _best(cells: Sequence[CellResult], question: MethodQuestion, along: str) -> Iterator[dict[str, Any]]:
    """A line for each place: the best method, and what it was compared with."""
    places: dict[tuple[Any, ...], list[_Entry]] = {}
    for cell in cells:
        row, of = cell.row, cell.row["cell"]
        searched = (of.get("search") or {}).get("quantity", "")
        is_asked = searched == question.searched or (
            not question.searched and question.field == "tokens_per_s"
        )
        if row["status"] in ("ok", "oom") and of.get(along) is not None and is_asked:
            place = (of["model"], of["cluster"], gpus(row), of[along])
            places.setdefault(place, []).append((row, settings(row)))
    for (model, cluster, ranks, place), entries in sorted(places.items()):
        alike = _most_compared(entries, question)
        values = _by_method(alike, question)
        lost = {strategy(row) for row, _ in alike if row["status"] == "oom"} - values.keys()
        if not values and any(row["status"] == "ok" for row, _ in entries):
            continue  # nothing was measured of what is asked
        ranked = sorted(values.items(), key=lambda item: item[1], reverse=question.bigger)
        row, common = alike[0]
        yield {
            "metric": question.title,
            "model": model,
            "cluster": cluster,
            "GPUs": ranks,
            "sequence length": place if along == "seq_len" else None,
            "batch": common["batch"] if common["batch"] is not None else "largest that fits",
            "precision": common["precision"],
            "sizes": ", ".join(f"{name} {value}" for name, value in _sizes(row)),
            "best method": strategy_name(ranked[0][0]) if ranked else None,
            "value": ranked[0][1] / question.divisor if ranked else None,
            "unit": question.unit,
            "compared with": ", ".join(strategy_name(method) for method, _ in ranked[1:]),
            "second": ranked[1][1] / question.divisor if len(ranked) > 1 else None,
            "out of memory": ", ".join(map(strategy_name, sorted(lost))),
            "strategy": ranked[0][0] if ranked else "",
        }


def _most_compared(entries: Sequence[_Entry], question: MethodQuestion) -> Sequence[_Entry]:
    """The entries that are alike: of the whole model if there are any, then with the most methods, then with
    the largest batch."""

    def key(entry: _Entry) -> tuple[Any, ...]:
        row, of = entry
        return _sizes(row), *(of.get(name) for name in _ALIKE)

    def rank(item: tuple[tuple[Any, ...], list[_Entry]]) -> tuple[Any, ...]:
        (sizes, batch, *others), some = item
        methods = len(_by_method(some, question)), len({strategy(row) for row, _ in some})
        return -len(sizes), *methods, batch or 0, str((sizes, others))

    answering = [
        (row, of)
        for row, of in entries
        if row["status"] == "oom" or row["measurement"].get(question.field) is not None
    ]
    return max(grouped(answering, key).items(), key=rank)[1] if answering else entries


def _sizes(row: Row) -> tuple[tuple[str, Any], ...]:
    """The options that make the model another one, as fewer layers do: numbers and flags. Words choose how
    it is computed, which methods may differ in."""
    options = row["cell"].get("model_options") or {}
    numbers = {name: value for name, value in sorted(options.items()) if not isinstance(value, str)}
    return tuple((name, str(value) if isinstance(value, list) else value) for name, value in numbers.items())


def _by_method(entries: Sequence[_Entry], question: MethodQuestion) -> dict[str, float]:
    """The best value of each method that has any."""
    values: dict[str, list[float]] = {}
    for row, _ in entries:
        value = row["measurement"].get(question.field) if row["status"] == "ok" else None
        if value is not None:
            values.setdefault(strategy(row), []).append(value)
    return {method: (max if question.bigger else min)(of) for method, of in values.items()}


def _heat_map(lines: Sequence[Mapping[str, Any]], place: str) -> str:
    """Places coloured by their best method, each with its value; a cross where a method ran out of memory."""
    columns = sorted({line[place] for line in lines})
    rows = sorted({line["GPUs"] for line in lines}, reverse=True)
    height = len(rows) * _HEIGHT
    svg = Svg(_LEFT + len(columns) * _WIDTH + 4, height + AXIS)
    for at, ranks in enumerate(rows):
        svg.text(_LEFT - 8, at * _HEIGHT + 21, f"{ranks} GPU{'s' * (ranks > 1)}", "end")
    for at, value in enumerate(columns):
        text = length_text(value) if place == "sequence length" else str(value)
        svg.text(_LEFT + (at + 0.5) * _WIDTH, height + 16, text, "middle")
    for line in lines:
        left, top = _LEFT + columns.index(line[place]) * _WIDTH, rows.index(line["GPUs"]) * _HEIGHT
        color = method_color(line["strategy"]) if line["strategy"] else "#888888"
        dark = line["strategy"] and contrast(color) >= _DARK
        lost = "\N{MULTIPLICATION SIGN}" if line["out of memory"] else ""
        box = (left + 1, top + 1, _WIDTH - 2, _HEIGHT - 2)
        svg.rect(box, color, _title(line), 1 if line["strategy"] else 0.4)
        text = f"{'' if line['value'] is None else tick_texts([line['value']])[0]} {lost}".strip()
        svg.text(left + _WIDTH / 2, top + 21, text, "middle", "#ffffff" if dark else "#000000")
    return str(svg)


def _title(line: Mapping[str, Any]) -> str:
    """What a place says when it is pointed at."""
    value, unit = line["value"], line["unit"]
    # a rate with three digits, else all of the whole part
    spelled = three_digits if unit.endswith("/s") else number
    text = "none" if value is None else f"{spelled(value)} {unit}"
    further = [name for name in ("batch", "sizes", "compared with", "out of memory") if line[name]]
    words = [f"{name}: {line[name]}" for name in further]
    return "; ".join([f"{line['best method'] or 'no method'}: {text}", *words])
