"""The drawing of one layer: what each rank computes and sends, over time, and the messages between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from spbench.bench.tools.report.page import DataTable, Drawing
from spbench.bench.tools.report.svg import AXIS, LABELS, Svg, ticks
from spbench.impls.traffic import WIRE_SHARE

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
    table = DataTable(name, caption, [_line(bar) for bar in bars])
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


def _line(bar: Bar) -> dict[str, Any]:
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
