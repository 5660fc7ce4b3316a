"""The numbers of a strategy's page, as lines of tables: bytes by closed form and by meter, memory at the
peak, time of a layer, verdicts of verification, and the cells of results that use it; and the drawing of one
layer: what each rank computes and sends, over time, and the messages between ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from spbench.bench.measure import Verdict
from spbench.bench.row import Row
from spbench.bench.tools.report.drawings import WAIT, layer_figure, svg
from spbench.bench.tools.report.gathered import CellResult
from spbench.bench.tools.report.page import DataTable, Figure
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


Bar = dict[str, Any]
#: significant digits of times in a drawing
_DIGITS = 9
#: of a bar, what a table has
_COLUMNS = ("row", "phase", "operator", "kind", "start", "duration", "bytes", "partners")


def layer_table(trace: Mapping[str, Any], strategy: str, name: str, model: str) -> DataTable:
    """What ranks do in the phases of a layer, drawn.

    Args:
        trace: as :func:`tools.papers.reproductions.read_trace` gives it.
        name: of the table on the strategy's page.
        model: in words, for the caption.
    """
    bars = [bar for bar in bars_of(trace) if bar["phase"] in ("forward", "backward")]
    spent: Counter[str] = Counter()
    for bar in bars:
        spent[f"{bar['phase']} {bar['kind']}"] += bar["duration"] * (bar["rank"] == 0)
    parts = ", ".join(f"{kind} {ms:.3g} ms" for kind, ms in spent.most_common() if ms)
    alt = f"Bars over time for the compute and communication streams of each rank; rank 0: {parts}."
    caption = f"Forward and backward of one layer of {model}, simulated: times in ms from the step's start"
    content = svg(layer_figure(bars, [*messages(bars)]))
    drawn = Figure(f"figures/{strategy}-{name}.svg", content, caption, alt)
    return DataTable(name, caption, bars, _COLUMNS, most=0, drawn=drawn)


def bars_of(trace: Mapping[str, Any]) -> list[Bar]:
    """A bar for each event of each rank that takes time: ``rank``, ``lane`` (0 is the compute stream's),
    ``row`` (its label), ``phase``, ``operator``, ``kind``, ``start`` and ``end`` and ``duration`` in ms,
    ``bytes``, ``flops``, ``partners`` (ranks that take part, as text), ``source`` and ``destination`` of a
    message."""
    return [
        _bar(event)
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["cat"] != "phase" and event["dur"] > 0
    ]


def _bar(event: Mapping[str, Any]) -> Bar:
    rank, lane, details = event["pid"], event["tid"] - 1, event["args"]
    is_collective = event["cat"] != "compute" and "class" not in details
    kernel = str(details.get("class", WAIT))
    return {
        "rank": rank,
        "lane": lane,
        "row": f"rank {rank} " + ("compute" if lane == 0 else "network" if lane == 1 else f"network {lane}"),
        "phase": details["phase"],
        "operator": event["name"],
        "kind": str(event["name"]).replace("_", "-") if is_collective else kernel,
        "start": _in_ms(event["ts"]),
        "end": _in_ms(event["ts"] + event["dur"]),
        "duration": _in_ms(event["dur"]),
        "partners": _partners(rank, details),
        **{name: details.get(name) for name in ("bytes", "flops", "source", "destination")},
    }


def _in_ms(microseconds: float) -> float:
    return float(f"{microseconds / 1e3:.{_DIGITS}g}")


def _partners(rank: int, details: Mapping[str, Any]) -> str:
    if "ranks" in details:
        return "ranks " + ", ".join(map(str, details["ranks"]))
    if "source" not in details:
        return ""
    to, sender = details["destination"], details["source"]
    return f"to rank {to}" if sender == rank else f"from rank {sender}"


def messages(bars: Sequence[Bar]) -> Iterator[Bar]:
    """A line for each message, from the row of its sender, when it starts, to the row where it is received,
    when it ends."""

    def message(bar: Bar) -> tuple[Any, ...]:
        return bar["source"], bar["destination"], bar["start"], bar["end"]

    received = {message(bar): bar for bar in bars if bar["kind"] == "recv"}
    for bar in bars:
        if bar["kind"] == "send" and (there := received.get(message(bar))):
            yield {**bar, "from": bar["row"], "to": there["row"]}
