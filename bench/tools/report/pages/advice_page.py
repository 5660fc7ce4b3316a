"""The page of kept answers of `spbench advise`: the best layouts of each question, beside their floors."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spbench.bench.measure import with_band
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import AXIS, DataTable, Drawing, Page, Svg, ticks
from spbench.bench.units import GIB
from spbench.plots.style import backend_name, length_text, method_color, model_name, strategy_name

#: of results: a folder of CSV files of `spbench advise --format csv`
FOLDER = "advice"
#: what makes lines of one question, and what all have that were written by that command
_QUESTION = ("model", "cluster", "gpus", "seq_len", "batch")
_NEEDED = (*_QUESTION, "strategy", "mesh", "backend", "step_time_s", "peak_memory_bytes")
_NUMBERS = {
    "step s": "step_time_s",
    "at least": "step_time_low_s",
    "at most": "step_time_high_s",
    "compute floor s": "compute_floor_s",
    "links floor s": "links_floor_s",
    "tokens/s": "tokens_per_s",
    "MFU": "mfu",
}
#: pixels of a layout, of its bar, of the labels and of the plot
_ROW, _BAR, _LEFT, _WIDTH = 26, 15, 330, 520
_INK = "#777777"


def pages(gathered: Gathered) -> Iterator[Page]:
    """advice.html, where answers were kept."""
    questions = kept(gathered.results / FOLDER)
    if questions:
        yield Page(
            "advice.html",
            "Advice",
            "advice.md",
            {"answers": [_drawing(f"advice-{at}", lines) for at, lines in enumerate(questions)]},
            order=80,
            summary="The fastest layouts that fit, for questions that spbench advise has answered.",
        )


def kept(folder: Path) -> list[list[dict[str, str]]]:
    """The lines of each question, in the order of the files; a file with other columns is left out."""
    questions: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if set(_NEEDED) <= set(reader.fieldnames or ()):
                for line in reader:
                    questions.setdefault(tuple(line[name] for name in _QUESTION), []).append(line)
    return list(questions.values())


def _drawing(name: str, lines: Sequence[Mapping[str, str]]) -> Drawing:
    first = lines[0]
    caption = (
        f"{model_name(first['model'])} on {first['gpus']} GPUs of {first['cluster']}, "
        f"batch {first['batch']}, sequence length {length_text(int(first['seq_len']))}: time of a step"
    )
    layouts = [_layout(line) for line in lines]
    ties = [line["layout"] for line in layouts if line["tie"]]
    tie = f", a tie with {', '.join(ties[1:])}" if len(ties) > 1 else ""
    alt = f"The best is {layouts[0]['layout']} with {layouts[0]['step s']:.3g} s{tie}."
    return Drawing(alt, [("", _bars(layouts))], DataTable(name, caption, layouts))


def _layout(kept_line: Mapping[str, str]) -> dict[str, Any]:
    line = {**kept_line, **_interval(kept_line)}
    return {
        "layout": f"{strategy_name(line['strategy'])}, {line['mesh']}, {backend_name(line['backend'])}",
        "strategy": line["strategy"],
        "tie": line.get("tie", "").lower() == "true",
        "settings": line.get("settings", ""),
        **{head: float(line[name]) if line.get(name) else None for head, name in _NUMBERS.items()},
        "peak GiB": float(line["peak_memory_bytes"]) / GIB,
        "bound": line.get("bound", ""),
    }


def _interval(line: Mapping[str, str]) -> dict[str, Any]:
    """The ends of the interval of a step time as this version has them, whatever the file has; {}: none."""
    measurement: dict[str, Any] = {name: line.get(name) for name in ("rates", "bound")}
    measurement["step_time_s"] = float(line["step_time_s"])
    with suppress(ValueError, SyntaxError):  # damaged
        measurement["priced_by"] = ast.literal_eval(line.get("priced_by") or "[]")
    with_ends = with_band({"cell": line, "measurement": measurement})["measurement"]
    return {name: with_ends.get(name) for name in ("step_time_low_s", "step_time_high_s")}


def _bars(layouts: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each layout, with the interval of its errors and its floor."""
    most = max(line["at most"] or line["step s"] for line in layouts)
    scale, height = _WIDTH / most, len(layouts) * _ROW
    svg = Svg(_LEFT + _WIDTH + 20, height + AXIS)
    for at, line in enumerate(layouts):
        top, middle = at * _ROW + (_ROW - _BAR) / 2, at * _ROW + _ROW / 2
        svg.text(_LEFT - 8, middle + 4, line["layout"], "end")
        title = f"{line['layout']}: {line['step s']:.3g} s, {line['peak GiB']:.3g} GiB; {line['settings']}"
        svg.rect((_LEFT, top, line["step s"] * scale, _BAR), method_color(line["strategy"]), title)
        if line["at least"] and line["at most"]:
            svg.line([(_LEFT + line[end] * scale, middle) for end in ("at least", "at most")], _INK)
        if line["compute floor s"]:
            left = _LEFT + line["compute floor s"] * scale
            svg.line(
                [(left, top - 3), (left, top + _BAR + 3)], _INK, f"floor {line['compute floor s']:.3g} s"
            )
    for seconds in ticks(0, most, 6):
        left = _LEFT + seconds * scale
        svg.line([(left, height), (left, height + 5)]).text(left, height + 19, f"{seconds:g} s", "middle")
    return str(svg)
