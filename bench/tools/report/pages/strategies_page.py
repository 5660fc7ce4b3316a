"""A page of all strategies, and a page of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure import (
    Verdict,
    changed_parts,
    commit_of,
    read_rows,
    read_verdicts,
    verified_code,
)
from spbench.bench.row import Row
from spbench.bench.tools.papers.reproductions import LAYERS, read_trace
from spbench.bench.tools.report import strategy_numbers as numbers
from spbench.bench.tools.report.gathered import CellResult, Gathered
from spbench.bench.tools.report.page import DataTable, Page
from spbench.impls.discovery import absent
from spbench.impls.registries import peers, strategies
from spbench.plots.style import model_name, strategy_name

#: statuses of cells that a strategy has run
_RAN = ("ok", "oom", "mismatch")


def pages(gathered: Gathered) -> Iterator[Page]:
    """strategies.html, and strategy-NAME.html of each strategy."""
    classes = dict(sorted(strategies().items()))
    verdicts = read_verdicts(gathered.results / "verification")
    proofs = {name: _proof(name, verdicts) for name in classes}
    yield Page(
        "strategies.html",
        "Strategies",
        "strategies.md",
        {
            "strategies": [(cls, strategy_name(name), proofs[name]) for name, cls in classes.items()],
            "cells": {name: len(numbers.uses(name, gathered.cells)) for name in classes},
            "peers": [(name, cls, absent(cls.requires)) for name, cls in sorted(peers().items())],
        },
        "Strategies",
        30,
        "Strategies that divide the training of one sequence among several devices.",
        "All strategies",
    )
    for name, cls in classes.items():
        title, cells = strategy_name(name), numbers.uses(name, gathered.cells)
        yield Page(
            f"strategy-{name}.html",
            title[:1].upper() + title[1:],
            "strategy.md",
            {
                "strategy": cls,
                "options": fields(cls.options_type),
                "about": sys.modules[cls.__module__].__doc__ or cls.__doc__ or "",
                "layers": list(_layers(gathered, name)),
                "uses": numbers.scenario_lines(cells),
                "folder": f"{gathered.results}/verification",
                "proof": proofs[name],
                **_measured(name, gathered, cells),
            },
            "Strategies",
            31,
            f"{cls.summary[:1].upper()}{cls.summary[1:]}.",
        )


def _at(cell: Cell) -> str:
    """The model and the shape of a cell, in words."""
    return f"{model_name(cell.model)}, batch {cell.batch}, {cell.seq_len:,} positions, {cell.precision}"


def _made(row: Row, cell: Cell) -> dict[str, Any]:
    """The cell of a row, the commit and the day that the row was made, and what has changed since."""
    day = str(row.get("time") or "an unknown day")[:10]
    commit = f"{commit_of(row) or 'unknown'} on {day}"
    return {"cell": cell, "at": _at(cell), "commit": commit, "changed": changed_parts(cell, row)}


def _layers(gathered: Gathered, name: str) -> Iterator[dict[str, Any]]:
    """One layer of a strategy from the kept traces, for each choice of its options."""
    for row in read_rows(gathered.strategies / LAYERS)[0]:
        cell = Cell.model_validate(row["cell"])
        trace = read_trace(gathered.strategies, cell) if cell.strategy == name else None
        if trace is None:
            continue
        ranks, place = cell.sizes.world, "-".join(["", *map(str, cell.strategy_options.values())])
        options = "".join(f", {option} {value}" for option, value in cell.strategy_options.items())
        on = f"{ranks} rank{'s' * (ranks > 1)}{options}"
        caption = f"What each rank's time of the step goes to{options}"
        yield {
            **_made(row, cell),
            "on": on,
            "place": place,
            "drawing": numbers.layer_table(trace, name, f"phases{place}", f"{_at(cell)}, on {on}"),
            "times": DataTable(f"times{place}", caption, numbers.time_lines(trace)),
        }


def _measured(name: str, gathered: Gathered, cells: Sequence[CellResult]) -> Mapping[str, Any]:
    """The strategy's bytes by closed form and by meter beside other strategies' memory, from the row that
    sets them beside each other (None: there is none), and the cells where bytes differ."""
    ran = [row for row in gathered.strategy_rows if row["status"] in _RAN]
    row = next((row for row in ran if row["cell"]["strategy"] == name), None)
    wrong = [each.row["key"] for each in cells if each.row["measurement"].get("formula_difference")]
    about = {"made": None, "wrong": wrong, "cells": len(cells)}
    if row is None:
        return about
    cell, lines, shape = (
        Cell.model_validate(row["cell"]),
        numbers.formula_lines(row),
        ("model", "batch", "seq_len"),
    )
    beside = [each for each in ran if all(each["cell"][of] == row["cell"][of] for of in shape)]
    sent = f"Bytes that one rank sends in a training step: {_at(cell)}"
    held = f"Memory in GiB of the rank that needs most, at its peak, by what holds it: {_at(cell)}"
    return {
        **about,
        "made": _made(row, cell),
        "formula": DataTable("formula", sent, lines) if lines else None,
        "differing": [line for line in lines if line["difference"]],
        "memory": DataTable("memory", held, numbers.memory_lines(beside)),
    }


def _proof(name: str, verdicts: Sequence[Verdict]) -> Mapping[str, Any] | None:
    """What verification says of a strategy, alone and with others around it; None: it was not verified."""
    alone = [verdict for verdict in verdicts if verdict["strategy"] == name]
    own = [verdict for verdict in verdicts if name in verdict["strategy"].split("+")]
    if not own:
        return None
    judged = [verdict for verdict in own if verdict["status"] == "green" and verdict["dtype"] == "fp64"]
    caption = "Relative errors against one device in float64: the worst tensor of all ranks and cases"
    return {
        "alone": numbers.count_by_status(alone) if alone else None,
        "counts": numbers.count_by_status(own),
        "is_present": {verdict["code"] for verdict in own} == {verified_code()},
        "worst": max(judged, key=lambda verdict: verdict["error"] or 0.0, default=None),
        "runs": sorted(
            {(v["commit"], v["torch"], v["time"][:10], v["code"] == verified_code()) for v in own}, key=str
        ),
        "table": DataTable("verification", caption, numbers.verdict_lines(own), sortable=True),
    }
