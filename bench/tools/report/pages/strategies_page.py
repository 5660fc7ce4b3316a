"""A page of all strategies, and a page for each strategy: a drawing of one layer, bytes by closed form and by
meter, memory at the peak, verdicts of verification, and the cells of results that use the strategy."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any
from urllib.parse import urlencode

from pandas import DataFrame

from spbench.bench.cell import Cell
from spbench.bench.measure import changed_parts, read_rows
from spbench.bench.row import Row, commit_of
from spbench.bench.tools.papers.reproductions import LAYERS, read_trace
from spbench.bench.tools.report.drawings import layer_table
from spbench.bench.tools.report.gathered import CellResult, Gathered
from spbench.bench.tools.report.page import DataTable, Page
from spbench.bench.units import GIB, MS
from spbench.bench.verdicts import Verdict, read_verdicts, verified_code
from spbench.impls import absent, all_peers, all_strategies
from spbench.plots.series import grouped
from spbench.plots.style import model_name, strategy_name

#: the statuses of cells that ran, so that they have numbers
_RAN = ("ok", "oom", "mismatch")


def pages(gathered: Gathered) -> Iterator[Page]:
    """The pages strategies.html, and strategy-NAME.html for each strategy."""
    classes = dict(sorted(all_strategies().items()))
    verdicts = read_verdicts(gathered.results / "verification")
    proofs = {name: _proof(name, verdicts) for name in classes}
    yield Page(
        "strategies.html",
        "Strategies",
        "strategies.md",
        {
            "strategies": [(cls, strategy_name(name), proofs[name]) for name, cls in classes.items()],
            "cells": {name: len(uses(name, gathered.cells)) for name in classes},
            "peers": [(name, cls, absent(cls.requires)) for name, cls in sorted(all_peers().items())],
        },
        "Strategies",
        30,
        "Strategies that divide the training of one sequence among several devices.",
        "All strategies",
    )
    for name, cls in classes.items():
        title, cells = strategy_name(name), uses(name, gathered.cells)
        yield Page(
            f"strategy-{name}.html",
            title[:1].upper() + title[1:],
            "strategy.md",
            {
                "strategy": cls,
                "options": fields(cls.options_type),
                "about": sys.modules[cls.__module__].__doc__ or cls.__doc__ or "",
                "layers": list(_layers(gathered, name)),
                "uses": scenario_lines(cells),
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
    """The cell, commit and day of a row, and the parts of the code that have changed since that commit."""
    day = str(row.get("time") or "an unknown day")[:10]
    commit = f"{commit_of(row) or 'unknown'} on {day}"
    return {"cell": cell, "at": _at(cell), "commit": commit, "changed": changed_parts(cell, row)}


def _layers(gathered: Gathered, name: str) -> Iterator[dict[str, Any]]:
    """A drawing of one layer of a strategy, and a table of its times, for each of the saved traces."""
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
            "drawing": layer_table(trace, name, f"phases{place}", f"{_at(cell)}, on {on}"),
            "times": DataTable(f"times{place}", caption, time_lines(trace)),
        }


def _measured(name: str, gathered: Gathered, cells: Sequence[CellResult]) -> Mapping[str, Any]:
    """The page's values on a strategy's bytes by closed form and by meter, its memory next to others', and
    the keys of cells whose bytes differ; ``made`` is None if no row compares the strategy with others."""
    ran = [row for row in gathered.strategy_rows if row["status"] in _RAN]
    row = next((row for row in ran if row["cell"]["strategy"] == name), None)
    wrong = [each.row["key"] for each in cells if each.row["measurement"].get("formula_difference")]
    about = {"made": None, "wrong": wrong, "cells": len(cells)}
    if row is None:
        return about
    cell, lines = Cell.model_validate(row["cell"]), formula_lines(row)
    shape = ("model", "batch", "seq_len")
    beside = [each for each in ran if all(each["cell"][of] == row["cell"][of] for of in shape)]
    sent = f"Bytes that one rank sends in a training step: {_at(cell)}"
    held = f"Memory in GiB of the rank that needs most, at its peak, by what holds it: {_at(cell)}"
    return {
        **about,
        "made": _made(row, cell),
        "formula": DataTable("formula", sent, lines) if lines else None,
        "differing": [line for line in lines if line["difference"]],
        "memory": DataTable("memory", held, memory_lines(beside)),
    }


def _proof(name: str, verdicts: Sequence[Verdict]) -> Mapping[str, Any] | None:
    """The page's values on verifying a strategy, by itself and in combinations; None if not verified."""
    alone = [verdict for verdict in verdicts if verdict["strategy"] == name]
    own = [verdict for verdict in verdicts if name in verdict["strategy"].split("+")]
    if not own:
        return None
    judged = [verdict for verdict in own if verdict["status"] == "green" and verdict["dtype"] == "fp64"]
    caption = "Relative errors against one device in float64: the worst tensor of all ranks and cases"
    return {
        "alone": count_by_status(alone) if alone else None,
        "counts": count_by_status(own),
        "is_present": {verdict["code"] for verdict in own} == {verified_code()},
        "worst": max(judged, key=lambda verdict: verdict["error"] or 0.0, default=None),
        "runs": sorted(
            {(v["commit"], v["torch"], v["time"][:10], v["code"] == verified_code()) for v in own}, key=str
        ),
        "table": DataTable("verification", caption, verdict_lines(own), sortable=True),
    }


# -- the numbers, as lines of tables ----------------------------------------------------------------------

Line = dict[str, Any]

_FORMULA, _METERED = "closed form (bytes)", "metered (bytes)"


def formula_lines(row: Row) -> list[Line]:
    """A line for each phase, collective and axis with the bytes that one rank sends in a step: by the closed
    form, as metered, and the difference, which is 0 where both are right. Where the row says that another
    rank's bytes differ, that rank has a line of its own."""
    measured, lines = row["measurement"], {}
    formula, metered = (grouped(measured.get(name) or [], _place) for name in ("formula", "communication"))
    for place in formula | metered:
        purposes = dict.fromkeys(entry["purpose"] for entry in formula.get(place, ()))
        sent = (sum(entry["sent_bytes"] for entry in of.get(place, ())) for of in (formula, metered))
        lines[place] = _line(place, ", ".join(purposes), *sent)
    others = [
        _line(_place(entry), f"on rank {entry['rank']}", entry["formula_bytes"], entry["metered_bytes"])
        for entry in measured.get("formula_difference") or []
        if not lines.get(_place(entry), {}).get("difference")
    ]
    return [line for line in lines.values() if line[_FORMULA] or line[_METERED]] + others


def _place(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return entry["phase"], entry["collective"].replace("_", "-"), entry.get("axis", "")


def _line(place: Sequence[str], purpose: str, formula: float, metered: float) -> Line:
    about = dict(zip(("phase", "collective", "axis"), place, strict=True)) | {"purpose": purpose}
    return {**about, _FORMULA: formula, _METERED: metered, "difference": metered - formula}


def memory_lines(rows: Iterable[Row]) -> list[Line]:
    """The memory at the peak of the rank that needs most, in GiB: a line for each row, the largest first,
    with ``in all`` and a column for each category of tensors that has bytes in any row."""
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


def time_lines(trace: Mapping[str, Any]) -> list[dict[Any, Any]]:
    """A line for each rank with the parts of its time in a traced step, in ms."""
    table = DataFrame(trace["otherData"]["by_rank"]) / MS
    table.columns = [f"{str(part).removesuffix('_s').replace('_', ' ')} (ms)" for part in table]
    return table.rename_axis("rank").reset_index().to_dict("records")


# -- verification ----------------------------------------------------------------------------------------


def verdict_lines(verdicts: Iterable[Verdict]) -> list[Line]:
    """A line for each strategy, model, part, precision and backend, those with most red verdicts first."""
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
    where = group[0]["reason"]
    if worst:
        on = f" on {worst['mesh']}" if worst["mesh"] else ""
        where = f"{worst['tensor']}{on} {worst['verdict'] or worst['reason']}".strip()
    names = ("strategy", "model", "part", "precision", "backend")
    return {
        **dict(zip(names, key, strict=True)),
        "most ranks": max((verdict["size"] for verdict in judged), default=None),
        **counts,
        "largest error": worst["error"] if worst else None,
        "allowed": worst["limit"] if worst else None,
        "where": where,
    }


def _excess(verdict: Verdict) -> float:
    """The ratio of a verdict's error to its limit; infinite for a red verdict without an error."""
    if verdict["error"] is None or not verdict["limit"]:
        return float("inf") if verdict["status"] == "RED" else 0.0
    return float(verdict["error"] / verdict["limit"])


def count_by_status(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """The numbers of green, red and unsupported verdicts."""
    counts: Counter[str] = Counter()
    for verdict in verdicts:
        counts[verdict["status"].lower()] += verdict["cases"]
    return {status: counts[status] for status in ("green", "red", "unsupported")}


# -- cells -----------------------------------------------------------------------------------------------


def uses(strategy: str, cells: Iterable[CellResult]) -> list[CellResult]:
    """The cells that use the strategy, by itself or combined with others ("A+B")."""
    return [cell for cell in cells if strategy in cell.row["cell"].get("strategy", "").split("+")]


def scenario_lines(cells: Iterable[CellResult]) -> list[Line]:
    """A line for each scenario and strategy: the number of cells, their statuses, and a link to the cells."""
    groups = grouped(cells, lambda cell: (cell.scenario, cell.row["cell"]["strategy"]))
    lines = []
    for (scenario, strategy), some in sorted(groups.items()):
        about = {"scenario": scenario, "strategy": strategy}
        statuses = sorted(Counter(cell.row["status"] for cell in some).items())
        ended = ", ".join(f"{count} {status}" for status, count in statuses)
        link = f"cells.html#{urlencode(about)}"
        lines.append({**about, "cells": len(some), "of which": ended, "link": link})
    return lines
