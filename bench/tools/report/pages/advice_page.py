"""The page of kept answers of `spbench advise`: the best layouts of each question, beside their floors."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from spbench.bench.tools.report.charts import method_scale, spec_of
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import Chart, DataTable, Page
from spbench.plots.style import strategy_name

#: of results: a folder of CSV files of `spbench advise --format csv`
FOLDER = "advice"
#: what makes lines of one question, and what all have that were written by that command
_QUESTION = ("model", "cluster", "gpus", "seq_len", "batch")
_NEEDED = (*_QUESTION, "strategy", "mesh", "backend", "step_time_s", "peak_memory_bytes")
_GIB = 2**30
#: pixels of a layout, which has two lines of text: the strategy, and below it mesh and backend
_ROW = 36
_LABEL = "[split(datum.value, ' ')[0], join(slice(split(datum.value, ' '), 1), ' ')]"

Line = Mapping[str, Any]


def pages(gathered: Gathered) -> Iterator[Page]:
    """advice.html, where answers were kept."""
    questions = kept(gathered.results / FOLDER)
    if questions:
        yield Page(
            "advice.html",
            "Advice",
            "advice.html",
            {"charts": [_chart(f"advice-{at}", lines) for at, lines in enumerate(questions)]},
            order=80,
            summary="The fastest layouts that fit, of the questions that spbench advise was asked.",
        )


def kept(folder: Path) -> list[list[dict[str, str]]]:
    """The lines of each question, in the order of the files; a file with other columns is left out."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if set(_NEEDED) <= set(reader.fieldnames or ()):
                for line in reader:
                    found.setdefault(tuple(line[name] for name in _QUESTION), []).append(line)
    return list(found.values())


def _chart(name: str, lines: Sequence[Mapping[str, str]]) -> Chart:
    first = lines[0]
    caption = (
        f"{first['model']}, {first['gpus']} GPUs of {first['cluster']}, {first['batch']} sequences of "
        f"{first['seq_len']}: seconds of a step"
    )
    shown = [_shown(line) for line in lines]
    ties = [line["layout"] for line in shown if line["tie"]]
    best = shown[0]
    alt_text = f"The best is {best['layout']} with {best['step s']:.3g} s"
    if len(ties) > 1:
        alt_text += f", a tie with {', '.join(ties[1:])}"
    values = [{**line, "method": strategy_name(line["strategy"])} for line in shown]
    return Chart(
        name, caption, f"{alt_text}.", _spec(values, shown), DataTable(f"{name}-layouts", caption, shown)
    )


def _spec(values: Sequence[Line], shown: Sequence[Line]) -> dict[str, Any]:
    order = [line["layout"] for line in shown]
    y = alt.Y("layout:N", sort=order, title=None, axis=alt.Axis(labelExpr=_LABEL))
    color = alt.Color("method:N", scale=method_scale([line["strategy"] for line in shown]), legend=None)
    bars = (
        alt.Chart()
        .mark_bar(height={"band": 0.6})
        .encode(x=alt.X("step s:Q", title="seconds of a step"), y=y, color=color)
    )
    bands = alt.Chart().mark_rule(color="#777777").encode(x=alt.X("at least:Q"), x2="at most:Q", y=y)
    floor = alt.Chart().mark_tick(color="#777777", thickness=3).encode(x="compute floor s:Q", y=y)
    chart = alt.layer(bars, bands, floor).properties(width="container", height=_ROW * len(order))
    return spec_of(chart, values)


def _shown(line: Mapping[str, str]) -> dict[str, Any]:
    numbers = {
        "step s": "step_time_s",
        "at least": "step_time_low_s",
        "at most": "step_time_high_s",
        "compute floor s": "compute_floor_s",
        "links floor s": "links_floor_s",
        "tokens/s": "tokens_per_s",
        "MFU": "mfu",
    }
    return {
        "layout": f"{line['strategy']} {line['mesh']}, {line['backend']}",
        "strategy": line["strategy"],
        "tie": line.get("tie", "").lower() == "true",
        "settings": line.get("settings", ""),
        **{shown: float(line[name]) if line.get(name) else None for shown, name in numbers.items()},
        "peak GiB": float(line["peak_memory_bytes"]) / _GIB,
        "bound": line.get("bound", ""),
    }
