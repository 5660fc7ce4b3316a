"""A page of all strategies, and a page of each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from spbench.bench.clusters.cluster import load_cluster
from spbench.bench.report import strategy_numbers as numbers
from spbench.bench.report.docstrings import as_html, in_line
from spbench.bench.report.gathered import CellResult, Gathered
from spbench.bench.report.layer_chart import layer_chart
from spbench.bench.report.memory_chart import memory_chart
from spbench.bench.report.one_layer import BACKWARD, FORWARD
from spbench.bench.report.page import DataTable, Page
from spbench.bench.report.side_by_side import Demonstration, demonstrations
from spbench.bench.verification.verdicts import Verdict, read_verdicts, verified_code
from spbench.impls.peers.registry import absent, peers
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.registry import strategies
from spbench.plots.style import strategy_name

GROUP = "Strategies"


def pages(gathered: Gathered) -> Iterator[Page]:
    """strategies.html, and strategy-NAME.html of each strategy."""
    classes = dict(sorted(strategies().items()))
    shown = demonstrations(classes)
    verdicts = read_verdicts(gathered.results / "verification")
    yield _all(gathered, classes, shown, verdicts)
    for demonstration in shown:
        yield _one(gathered, classes[demonstration.strategy], demonstration, verdicts)


def path_of(strategy: str) -> str:
    """The page of a strategy."""
    return f"strategy-{strategy}.html"


# -- all of them -----------------------------------------------------------------------------------------


def _all(
    gathered: Gathered,
    classes: Mapping[str, type[Strategy]],
    shown: Sequence[Demonstration],
    verdicts: Sequence[Verdict],
) -> Page:
    lines = []
    for demonstration in shown:
        name = demonstration.strategy
        cls = classes[name]
        own = [verdict for verdict in verdicts if verdict["strategy"] == name]
        lines.append(
            {
                "name": name,
                "path": path_of(name),
                "summary": in_line(cls.summary),
                "source": in_line(cls.source),
                "axes": ", ".join(cls.axes),
                "verified": numbers.count_by_status(own) if own else None,
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
            "name": name,
            "summary": in_line(cls.summary),
            "source": in_line(cls.source),
            "axes": ", ".join(cls.axes),
            "requires": ", ".join(cls.requires),
            "installed": not absent(cls.requires),
        }
        for name, cls in sorted(peers().items())
    ]


# -- one of them -----------------------------------------------------------------------------------------


def _one(gathered: Gathered, cls: type[Strategy], shown: Demonstration, verdicts: Sequence[Verdict]) -> Page:
    name = cls.name
    cells = numbers.uses(name, gathered.cells)
    values = {
        "cls": cls,
        "source": in_line(cls.source),
        "about": as_html(inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")),
        "options": [(f.name, f.default) for f in fields(cls.options_type)],
        "shown": shown,
        "problems": [in_line(problem) for problem in shown.problems],
        "results": str(gathered.results),
        **_verification(name, verdicts),
        **_cells(name, cells),
    }
    if shown.cell is not None:
        values |= _measured(shown)
    return Page(
        path_of(name),
        strategy_name(name).capitalize() if strategy_name(name).islower() else strategy_name(name),
        "strategy.html",
        values,
        GROUP,
        order=31,
        summary=cls.summary[:1].upper() + cls.summary[1:] + ".",
    )


def _measured(shown: Demonstration) -> dict[str, Any]:
    cell = shown.cell
    assert cell is not None
    cluster = load_cluster(cell.cluster)
    at = f"{cell.model}, batch {cell.batch}, {cell.seq_len:,} positions, {cell.precision}"
    lines = numbers.formula_lines(shown.row)
    values: dict[str, Any] = {
        "at": at,
        "mesh": cell.mesh_text,
        "ranks": cell.sizes.world,
        "cluster": cluster.name,
        "layers": cell.model_options.get("layers"),
        "differs": [line for line in lines if line["difference"]],
        "formula": DataTable("formula", f"Bytes that one rank sends in a training step: {at}", lines),
        "memory": memory_chart(shown.beside, shown.strategy, at),
    }
    if shown.layer is not None:
        where = f"{at}, on {cell.sizes.world} {'ranks' if cell.sizes.world > 1 else 'rank'}"
        values["layer_charts"] = [
            layer_chart(shown.layer, phase, f"layer-{phase}", where) for phase in (FORWARD, BACKWARD)
        ]
        values["times"] = DataTable(
            "times",
            "What each rank's time goes to, forward and backward of the layer",
            numbers.time_lines(shown.layer),
        )
    return values


def _verification(name: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    own = [verdict for verdict in verdicts if name in verdict["strategy"].split("+")]
    judged = [verdict for verdict in own if verdict["status"] == "green" and verdict["dtype"] == "fp64"]
    worst = max(judged, key=lambda verdict: verdict["error"] or 0.0, default=None)
    made = {(v["commit"], v["torch"], v["time"][:10], v["code"] == verified_code()) for v in own}
    return {
        "verdicts": numbers.count_by_status(own) if own else None,
        "worst": worst,
        "made": sorted(made, key=str),
        "verdict_table": DataTable(
            "verification",
            "Relative errors against one device in float64: the worst tensor of all ranks and cases",
            numbers.verdict_lines(own),
            sortable=True,
        ),
    }


def _cells(name: str, cells: Sequence[CellResult]) -> dict[str, Any]:
    return {
        "cells": cells,
        "wrong_cells": numbers.differing(cells),
        "scenarios": numbers.scenario_lines(cells),
    }
