"""The numbers of a strategy's page, as lines of tables: bytes by closed form and by meter, memory at the
peak, time of a layer, verdicts of verification, and the cells of results that use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from spbench.bench.measure.verify.verdicts import Verdict
from spbench.bench.row import Row
from spbench.bench.tools.report.gathered import CellResult
from spbench.bench.units import GIB, MS
from spbench.plots.series import grouped
from spbench.plots.style import strategy_name

Line = dict[str, Any]

_FORMULA, _METERED = "closed form (bytes)", "metered (bytes)"


def formula_lines(row: Row) -> list[Line]:
    """What a rank sends in a step of a cell, in bytes, by phase, collective and axis: by the closed form, as
    metered, and the difference, which is 0 where both are right. Where the row says that another rank
    differs, it has a line of its own."""
    measured = row["measurement"]
    lines: dict[tuple[str, ...], Line] = {}
    purposes: dict[tuple[str, ...], dict[str, None]] = {}
    for column, entries in ((_FORMULA, "formula"), (_METERED, "communication")):
        for entry in measured.get(entries) or []:
            line = lines.setdefault(_place(entry), _line(entry, ""))
            line[column] += entry["sent_bytes"]
            if column == _FORMULA:
                purposes.setdefault(_place(entry), {})[entry["purpose"]] = None
    for place, line in lines.items():
        line["purpose"] = ", ".join(purposes.get(place, ()))
        line["difference"] = line[_METERED] - line[_FORMULA]
    differing = {place for place, line in lines.items() if line["difference"]}
    others = [
        _line(entry, f"on rank {entry['rank']}", entry["formula_bytes"], entry["metered_bytes"])
        for entry in measured.get("formula_difference") or []
        if _place(entry) not in differing
    ]
    return [line for line in lines.values() if line[_FORMULA] or line[_METERED]] + others


def _place(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return entry["phase"], entry["collective"].replace("_", "-"), entry.get("axis", "")


def _line(entry: Mapping[str, Any], purpose: str, formula: float = 0, metered: float = 0) -> Line:
    place = dict(zip(("phase", "collective", "axis"), _place(entry), strict=True))
    numbers = {_FORMULA: formula, _METERED: metered, "difference": metered - formula}
    return {**place, "purpose": purpose, **numbers}


def memory_lines(rows: Iterable[Row]) -> list[Line]:
    """What is held at the peak of the rank with the largest, in GiB: a line for each row, the largest first,
    with ``in all`` and a column for each category that any of them holds."""
    held = {row["cell"]["strategy"]: row["measurement"].get("peak_held") or {} for row in rows}
    categories = list(dict.fromkeys(name for of in held.values() for name, nbytes in of.items() if nbytes))
    ordered = sorted(held.items(), key=lambda entry: -sum(entry[1].values()))
    return [
        {
            "strategy": strategy_name(name),
            "in all": sum(of.values()) / GIB,
            **{category.replace("_", " "): of.get(category, 0) / GIB for category in categories},
        }
        for name, of in ordered
    ]


def time_lines(trace: Mapping[str, Any]) -> list[Line]:
    """What each rank's time of a traced step goes to, in ms."""
    return [
        {
            "rank": rank,
            **{
                f"{part.removesuffix('_s').replace('_', ' ')} (ms)": seconds / MS
                for part, seconds in of.items()
            },
        }
        for rank, of in enumerate(trace["otherData"]["by_rank"])
    ]


# -- verification ----------------------------------------------------------------------------------------


def verdict_lines(verdicts: Iterable[Verdict]) -> list[Line]:
    """Verdicts by model, part, precision and backend; red ones first, and of several cases the worst."""
    names = ("strategy", "model", "part", "dtype", "backend")
    groups = grouped(verdicts, lambda verdict: tuple(str(verdict[name]) for name in names))
    lines = [_verdict_line(key, group) for key, group in groups.items()]
    if len({line["strategy"] for line in lines}) == 1:
        lines = [{name: value for name, value in line.items() if name != "strategy"} for line in lines]
    return sorted(lines, key=lambda line: (-line["red"], -line["green"]))


def _verdict_line(key: tuple[str, ...], group: Sequence[Verdict]) -> Line:
    counts = count_by_status(group)
    judged = [verdict for verdict in group if verdict["status"] != "unsupported"]
    worst = max(judged, key=lambda v: (v["status"] == "RED", _excess(v)), default=None)
    names = ("strategy", "model", "part", "precision", "backend")
    return {
        **dict(zip(names, key, strict=True)),
        "ranks": ", ".join(map(str, sorted({verdict["size"] for verdict in judged}))),
        **counts,
        "largest error": worst["error"] if worst else None,
        "allowed": worst["limit"] if worst else None,
        "where": _of(worst) if worst else group[0]["reason"],
    }


def _excess(verdict: Verdict) -> float:
    """An error for its limit; a red one without an error is beyond any."""
    if verdict["error"] is None or not verdict["limit"]:
        return float("inf") if verdict["status"] == "RED" else 0.0
    return float(verdict["error"] / verdict["limit"])


def _of(verdict: Verdict) -> str:
    where = f" on {verdict['mesh']}" if verdict["mesh"] else ""
    return f"{verdict['tensor']}{where} {verdict['verdict'] or verdict['reason']}".strip()


def count_by_status(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many are green, red and unsupported."""
    counts = Counter(verdict["status"].lower() for verdict in verdicts)
    return {status: counts[status] for status in ("green", "red", "unsupported")}


# -- cells -----------------------------------------------------------------------------------------------


def uses(strategy: str, cells: Iterable[CellResult]) -> list[CellResult]:
    """The cells whose strategy it is, alone or with others around it or within it."""
    return [cell for cell in cells if strategy in cell.row["cell"].get("strategy", "").split("+")]


def scenario_lines(cells: Iterable[CellResult]) -> list[Line]:
    """Cells by scenario and name of the strategy: how they ended, and a link to them on the page of cells."""
    groups = grouped(cells, lambda cell: (cell.scenario, cell.row["cell"]["strategy"]))
    lines = []
    for (scenario, strategy), some in sorted(groups.items()):
        about = {"scenario": scenario, "strategy": strategy}
        statuses = sorted(Counter(cell.row["status"] for cell in some).items())
        ended = ", ".join(f"{count} {status}" for status, count in statuses)
        link = f"cells.html#{urlencode(about)}"
        lines.append({**about, "cells": len(some), "of which": ended, "link": link})
    return lines
