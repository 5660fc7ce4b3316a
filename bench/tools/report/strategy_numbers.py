"""The numbers of a strategy's page, as lines of tables: bytes by closed form and by meter, memory at the
peak, time of a layer, verdicts of verification, and the cells of results that use it; and the drawing of one
layer: what each rank computes and sends, over time, and the messages between ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any
from urllib.parse import urlencode

from spbench.bench.measure import Verdict
from spbench.bench.row import Row
from spbench.bench.tools.report.gathered import CellResult
from spbench.bench.tools.report.page import AXIS, LABELS, DataTable, Drawing, Svg, ticks
from spbench.bench.units import GIB, MS
from spbench.impls.traffic import WIRE_SHARE
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

#: pixels of a row of bars, of a bar in it, and of the time of a phase
_ROW, _BAR, _WIDTH = 21, 17, 950
_KERNELS = {"matmul": "#4477aa", "attention": "#ee8833", "memory-bound": "#8d95a0"}
_WAIT = "wait"
#: of collectives, in the order in which they are known; seen in both schemes beside the colours of kernels
_COLORS = ("#cc3355", "#2a9d55", "#aa44aa", "#13a5a5", "#b08900", "#6f5bd0", "#c2a000", "#8a8a2a", "#555555")
#: significant digits of times in a drawing
_DIGITS = 9


def layer_drawing(trace: Mapping[str, Any], phase: str, name: str, model: str) -> Drawing:
    """What ranks do in a phase of a layer.

    Args:
        trace: as :func:`tools.papers.reproductions.read_trace` gives it.
        name: of the drawing on its page.
        model: in words, for the caption.
    """
    bars = [bar for bar in bars_of(trace) if bar["phase"] == phase]
    caption = f"{phase.capitalize()} of one layer of {model}, simulated: time in ms from the step's start"
    spent: Counter[str] = Counter()
    for bar in bars:
        spent[bar["kind"]] += bar["duration"] * (bar["rank"] == 0)
    parts = ", ".join(f"{kind} {ms:.3g} ms" for kind, ms in spent.most_common() if ms)
    alt = f"Bars over time for the compute and communication streams of each rank, {phase}; rank 0: {parts}."
    table = DataTable(name, caption, [_bar_line(bar) for bar in bars])
    colors = kind_colors([bar["kind"] for bar in bars])
    return Drawing(alt, [("", _svg(bars, colors))], table, colors, lists=False)


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
    kernel = str(details.get("class", _WAIT))
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
            yield {"start": bar["start"], "end": bar["end"], "from": bar["row"], "to": there["row"]}


def _bar_line(bar: Bar) -> dict[str, Any]:
    """The bar as a line of a table."""
    return {
        "rank": bar["rank"],
        "stream": "compute" if bar["lane"] == 0 else "communication",
        "operator": bar["operator"],
        "kind": bar["kind"],
        "start (ms)": bar["start"],
        "duration (ms)": bar["duration"],
        "bytes": bar["bytes"],
        "with": bar["partners"],
    }


def kind_colors(kinds: Sequence[str]) -> dict[str, str]:
    """The colour of each kind of bar, kernels first; the same on every page."""
    collectives = {
        name.replace("_", "-"): color for name, color in zip(WIRE_SHARE, cycle(_COLORS), strict=False)
    }
    colors = {**_KERNELS, **collectives, _WAIT: "#9aa3ad"}
    return {kind: color for kind, color in colors.items() if kind in kinds}


def _svg(bars: Sequence[Bar], colors: Mapping[str, str]) -> str:
    """A row for each stream of each rank, with an axis of ms below."""
    ordered = sorted(bars, key=lambda bar: (bar["rank"], bar["lane"]))
    tops = {row: at * _ROW for at, row in enumerate(dict.fromkeys(bar["row"] for bar in ordered))}
    begin, end = min(bar["start"] for bar in bars), max(bar["end"] for bar in bars)
    height, scale = len(tops) * _ROW, _WIDTH / (end - begin)

    def x(ms: float) -> float:
        return LABELS + (ms - begin) * scale

    svg = Svg(LABELS + _WIDTH + 20, height + AXIS)
    for row, top in tops.items():
        label = row.removesuffix(" compute") if row.endswith(" compute") else "network"
        svg.text(LABELS - 8, top + _BAR - 3, label, "end")
    for ms in ticks(begin, end, 12):
        svg.line([(x(ms), height), (x(ms), height + 5)]).text(x(ms), height + 19, f"{ms:g} ms", "middle")
    for bar in bars:
        box = (x(bar["start"]), tops[bar["row"]] + 2, bar["duration"] * scale, _BAR)
        svg.rect(box, colors[bar["kind"]], _title(bar), 0.3 if bar["kind"] == _WAIT else 1)
    for each in messages(bars):
        ends = ((each["start"], each["from"]), (each["end"], each["to"]))
        svg.line([(x(ms), tops[row] + _ROW / 2) for ms, row in ends])
    return str(svg)


def _title(bar: Bar) -> str:
    """What a bar says when it is pointed at."""
    facts = [f"{bar['operator']} on {bar['row']}", f"start {bar['start']:.4f} ms"]
    facts.append(f"duration {bar['duration']:.4f} ms")
    if bar["bytes"] is not None:
        facts.append(f"{bar['bytes']:,.0f} bytes")
    if bar["flops"] is not None:
        facts.append(f"{bar['flops']:.3g} FLOP")
    return ", ".join(filter(None, [*facts, bar["partners"]]))
