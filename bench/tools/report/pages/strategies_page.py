"""A page of all strategies, and a page of each."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from markupsafe import Markup, escape

from spbench.bench.cell import Cell
from spbench.bench.measure.sweep.digest import changed_parts
from spbench.bench.measure.sweep.provenance import commit_of
from spbench.bench.measure.sweep.results import RESULTS_FILE, Row, read_rows
from spbench.bench.measure.verify.verdicts import Verdict, read_verdicts, verified_code
from spbench.bench.tools.papers.strategy_traces import LAYERS, read_trace
from spbench.bench.tools.report import strategy_numbers as numbers
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.layer_chart import layer_chart
from spbench.bench.tools.report.page import DataTable, Page
from spbench.impls.registries import absent, peers, strategies
from spbench.impls.strategies.base import Strategy
from spbench.plots.style import strategy_name

GROUP = "Strategies"
#: statuses of cells that a strategy has run
_RAN = ("ok", "oom", "mismatch")
_PHASES = ("forward", "backward")

_ARXIV = re.compile(r"arXiv:? ?(\d{4}\.\d{4,5})")
#: :role:`name` and ``code``
_CODE = re.compile(r"(?::[a-z]+:)?`{1,2}([^`]+)`{1,2}")
_GITHUB = re.compile(r"(?<![\w/])((?:github\.com|docs\.pytorch\.org)/[\w./-]*[\w/])")


def pages(gathered: Gathered) -> Iterator[Page]:
    """strategies.html, and strategy-NAME.html of each strategy."""
    classes = dict(sorted(strategies().items()))
    verdicts = read_verdicts(gathered.results / "verification")
    yield _all(gathered, classes, verdicts)
    for cls in classes.values():
        yield _one(gathered, cls, verdicts)


def path_of(strategy: str) -> str:
    """The page of a strategy."""
    return f"strategy-{strategy}.html"


# -- all of them -----------------------------------------------------------------------------------------


def _all(
    gathered: Gathered,
    classes: Mapping[str, type[Strategy]],
    verdicts: Sequence[Verdict],
) -> Page:
    lines = []
    for name, cls in classes.items():
        own = [verdict for verdict in verdicts if verdict["strategy"] == name]
        lines.append(
            {
                **_about(name, cls),
                "path": path_of(name),
                "verified": numbers.count_by_status(own) if own else None,
                "same_code": {verdict["code"] for verdict in own} == {verified_code()},
                "cells": len(numbers.uses(name, gathered.cells)),
            }
        )
    return Page(
        "strategies.html",
        "Strategies",
        "strategies.html",
        {"lines": lines, "peers": _peers()},
        GROUP,
        order=30,
        summary="Ways to spread the training of one sequence over several devices, on one interface.",
        short_title="All strategies",
    )


def _peers() -> list[dict[str, Any]]:
    return [
        {
            **_about(name, cls),
            "requires": ", ".join(cls.requires),
            "installed": not absent(cls.requires),
        }
        for name, cls in sorted(peers().items())
    ]


def _about(name: str, cls: type[Strategy]) -> dict[str, Any]:
    about = {"name": name, "axes": ", ".join(cls.axes)}
    return {**about, "summary": in_line(cls.summary), "source": in_line(cls.source)}


# -- one of them -----------------------------------------------------------------------------------------


def _one(gathered: Gathered, cls: type[Strategy], verdicts: Sequence[Verdict]) -> Page:
    name, cells = cls.name, numbers.uses(cls.name, gathered.cells)
    return Page(
        path_of(name),
        strategy_name(name).capitalize() if strategy_name(name).islower() else strategy_name(name),
        "strategy.html",
        {
            "cls": cls,
            "source": in_line(cls.source),
            "about": as_html(inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")),
            "options": [(f.name, f.default) for f in fields(cls.options_type)],
            "results": str(gathered.results),
            **_verification(name, verdicts),
            "cells": cells,
            "wrong_cells": numbers.differing(cells),
            "scenarios": numbers.scenario_lines(cells),
            **_step(gathered, name),
            "timelines": [*_timelines(gathered, name)],
        },
        GROUP,
        order=31,
        summary=cls.summary[:1].upper() + cls.summary[1:] + ".",
    )


def _at(cell: Cell) -> str:
    """The model and the shape of a cell, in words."""
    return f"{cell.model}, batch {cell.batch}, {cell.seq_len:,} positions, {cell.precision}"


def _step(gathered: Gathered, name: str) -> dict[str, Any]:
    """Bytes and memory of the strategy's first cell beside others; ``row`` is None where it has none."""
    ran = [row for row in gathered.strategy_rows if row["status"] in _RAN]
    row = next((row for row in ran if row["cell"]["strategy"] == name), None)
    if row is None:
        return {"row": None}
    cell = Cell.model_validate(row["cell"])
    shape = (cell.model, cell.batch, cell.seq_len)
    beside = [r for r in ran if (r["cell"]["model"], r["cell"]["batch"], r["cell"]["seq_len"]) == shape]
    lines = numbers.formula_lines(row)
    held = f"Memory in GiB of the rank that needs most, at its peak, by what holds it: {_at(cell)}"
    return {
        "row": row,
        "made": made(row),
        "changed": changed_parts(cell, row),
        "layers": cell.model_options.get("layers"),
        "differs": [line for line in lines if line["difference"]],
        "formula": DataTable("formula", f"Bytes that one rank sends in a training step: {_at(cell)}", lines),
        "memory": DataTable("memory", held, numbers.memory_lines(beside)),
    }


def made(row: Row) -> str:
    """The commit and the day that a row was made."""
    return f"{commit_of(row) or 'unknown'} on {str(row.get('time') or 'an unknown day')[:10]}"


def _timelines(gathered: Gathered, name: str) -> Iterator[dict[str, Any]]:
    """The timelines of one layer from the kept traces, one for each choice of the strategy's options."""
    for row in read_rows(gathered.strategies / LAYERS / RESULTS_FILE)[0]:
        cell = Cell.model_validate(row["cell"])
        if cell.strategy != name or (trace := read_trace(gathered.strategies, cell)) is None:
            continue
        options = ", ".join(f"{option} {value}" for option, value in cell.strategy_options.items())
        ranks, of = cell.sizes.world, "-".join(["", *map(str, cell.strategy_options.values())])
        with_options = f", {options}" if options else ""
        where = f"{_at(cell)}, on {ranks} {'ranks' if ranks > 1 else 'rank'}{with_options}"
        spent = f"What each rank's time of the step goes to{with_options}"
        yield {
            "options": options,
            "of": of,
            "at": _at(cell),
            "ranks": ranks,
            "mesh": cell.mesh_text,
            "cluster": cell.cluster,
            "made": made(row),
            "changed": changed_parts(cell, row),
            "charts": [layer_chart(trace, phase, f"layer{of}-{phase}", where) for phase in _PHASES],
            "times": DataTable(f"times{of}", spent, numbers.time_lines(trace)),
        }


def _verification(name: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    own = [verdict for verdict in verdicts if name in verdict["strategy"].split("+")]
    judged = [verdict for verdict in own if verdict["status"] == "green" and verdict["dtype"] == "fp64"]
    worst = max(judged, key=lambda verdict: verdict["error"] or 0.0, default=None)
    verified = {(v["commit"], v["torch"], v["time"][:10], v["code"] == verified_code()) for v in own}
    return {
        "verdicts": numbers.count_by_status(own) if own else None,
        "worst": worst,
        "same_code": {verdict["code"] for verdict in own} == {verified_code()},
        "verified_at": sorted(verified, key=str),
        "verdict_table": DataTable(
            "verification",
            "Relative errors against one device in float64: the worst tensor of all ranks and cases",
            numbers.verdict_lines(own),
            sortable=True,
        ),
    }


# -- docstrings as HTML: paragraphs, lists, code, and links to arXiv; all else is escaped ------------------


def as_html(text: str) -> Markup:
    """The paragraphs of a docstring that :func:`inspect.cleandoc` has cleaned."""
    return Markup("\n").join(_block(block) for block in re.split(r"\n\s*\n", text.strip()) if block.strip())


def in_line(text: str) -> Markup:
    """A line of text with its code marked and its papers linked."""
    html = _CODE.sub(r"<code>\1</code>", str(escape(text)))
    html = _ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>', html)
    return Markup(_GITHUB.sub(r'<a href="https://\1">\1</a>', html))  # escaped above


def _block(block: str) -> Markup:
    before, *items = re.split(r"(?:^|\n)\s*- ", block)
    html = Markup()
    if before.strip():
        html += Markup("<p>{}</p>").format(in_line(" ".join(before.split())))
    if items:
        lines = (Markup("<li>{}</li>").format(in_line(" ".join(item.split()))) for item in items)
        html += Markup("<ul>{}</ul>").format(Markup().join(lines))
    return html
