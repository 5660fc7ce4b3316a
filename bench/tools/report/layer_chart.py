"""The drawing of one layer: what each rank computes and sends, over time, and the messages between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import altair as alt

from spbench.bench.tools.report.page import Chart, DataTable, LegendEntry
from spbench.impls.traffic import WIRE_SHARE

Drawn = dict[str, Any]

#: pixels of a row of bars
_ROW = 21
_KERNELS = {"matrix product": "#4477aa", "attention": "#ee8833", "memory-bound": "#8d95a0"}
_WAIT = "wait"
#: of collectives, in the order in which they are known; seen in both schemes beside the colours of kernels
_COLORS = ("#cc3355", "#2a9d55", "#aa44aa", "#13a5a5", "#b08900", "#6f5bd0", "#c2a000", "#8a8a2a", "#555555")
#: significant digits of times in a drawing
_DIGITS = 9
#: of a row: the rank stands at its kernels alone
_LABEL = "indexof(datum.value, 'compute') > 0 ? split(datum.value, ' compute')[0] : 'network'"


def layer_chart(trace: Mapping[str, Any], phase: str, name: str, model: str) -> Chart:
    """What ranks do in a phase of a layer.

    Args:
        trace: as :func:`tools.papers.strategy_traces.read_trace` gives it.
        name: of the chart on its page.
        model: in words, for the caption.
    """
    bars = [bar for bar in drawn(trace) if bar["phase"] == phase]
    rows = list(dict.fromkeys(bar["row"] for bar in sorted(bars, key=lambda b: (b["rank"], b["lane"]))))
    kinds = [bar["kind"] for bar in bars]
    caption = f"{phase.capitalize()} of one layer of {model}, simulated: time in ms from the step's start"
    return Chart(
        name,
        caption,
        _alt(bars, phase),
        _spec(bars, messages(bars), rows),
        DataTable(f"{name}-events", caption, [_shown(bar) for bar in bars], sortable=True),
        legend=[LegendEntry(kind, "filled", color) for kind, color in kind_colors(kinds).items()],
    )


def drawn(trace: Mapping[str, Any]) -> list[Drawn]:
    """A bar for each event of each rank that takes time: ``rank``, ``lane`` (0 is the compute stream's),
    ``row`` (its label), ``phase``, ``operator``, ``kind``, ``start`` and ``end`` and ``duration`` in ms,
    ``bytes``, ``flops``, ``partners`` (ranks that take part, as text), ``source`` and ``destination`` of a
    message."""
    return [
        _bar(event)
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["cat"] != "phase" and event["dur"] > 0
    ]


def _bar(event: Mapping[str, Any]) -> Drawn:
    rank, lane, details = event["pid"], event["tid"] - 1, event["args"]
    return {
        "rank": rank,
        "lane": lane,
        "row": f"rank {rank} " + ("compute" if lane == 0 else "network" if lane == 1 else f"network {lane}"),
        "phase": details["phase"],
        "operator": event["name"],
        "kind": _kind(event),
        "start": _in_ms(event["ts"]),
        "end": _in_ms(event["ts"] + event["dur"]),
        "duration": _in_ms(event["dur"]),
        "partners": _partners(rank, details),
        **{name: details.get(name) for name in ("bytes", "flops", "source", "destination")},
    }


def _in_ms(microseconds: float) -> float:
    return float(f"{microseconds / 1e3:.{_DIGITS}g}")


def _kind(event: Mapping[str, Any]) -> str:
    if event["cat"] != "compute" and "class" not in event["args"]:
        return str(event["name"])
    return str(event["args"].get("class", _WAIT))


def _partners(rank: int, details: Mapping[str, Any]) -> str:
    if "ranks" in details:
        return "ranks " + ", ".join(map(str, details["ranks"]))
    if "source" not in details:
        return ""
    to, sender = details["destination"], details["source"]
    return f"to rank {to}" if sender == rank else f"from rank {sender}"


def messages(bars: Sequence[Drawn]) -> Iterator[Drawn]:
    """A line for each message, from the row of its sender, when it starts, to the row where it is received,
    when it ends."""
    received = {_message(bar): bar for bar in bars if bar["kind"] == "recv"}
    for bar in bars:
        if bar["kind"] == "send" and (there := received.get(_message(bar))):
            yield {"start": bar["start"], "end": bar["end"], "from": bar["row"], "to": there["row"]}


def _message(bar: Drawn) -> tuple[Any, ...]:
    return bar["source"], bar["destination"], bar["start"], bar["end"]


def _shown(bar: Drawn) -> dict[str, Any]:
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


def _alt(bars: Sequence[Drawn], phase: str) -> str:
    kinds: Counter[str] = Counter()
    for bar in bars:
        kinds[bar["kind"]] += bar["duration"] * (bar["rank"] == 0)
    parts = ", ".join(f"{kind} {ms:.3g} ms" for kind, ms in kinds.most_common() if ms)
    return f"Bars over time for the compute and communication streams of each rank, {phase}; rank 0: {parts}."


def kind_colors(kinds: Sequence[str]) -> dict[str, str]:
    """The colour of each kind of bar, kernels first; the same on every page."""
    collectives = dict(zip(WIRE_SHARE, cycle(_COLORS), strict=False))
    known = {**_KERNELS, **collectives, _WAIT: "#9aa3ad"}
    return {kind: color for kind, color in known.items() if kind in kinds}


def _spec(bars: Sequence[Drawn], lines: Iterator[Drawn], rows: Sequence[str]) -> dict[str, Any]:
    colors = kind_colors([bar["kind"] for bar in bars])
    color_scale, order = alt.Scale(domain=[*colors], range=[*colors.values()]), alt.Scale(domain=list(rows))
    row = alt.Y("row:N", sort=None, scale=order, title=None, axis=alt.Axis(labelExpr=_LABEL, ticks=False))
    x = alt.X("start:Q", title="ms", scale=alt.Scale(zero=False, nice=False), axis=alt.Axis(tickCount=8))
    zoom = alt.selection_interval(bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey]")
    boxes = (
        alt.Chart(alt.Data(values=list(bars)))
        .mark_bar(clip=True, height={"band": 0.82})
        .encode(
            x=x,
            x2="end:Q",
            y=row,
            color=alt.Color("kind:N", legend=None, scale=color_scale),
            fillOpacity=alt.condition(f"datum.kind === '{_WAIT}'", alt.value(0.3), alt.value(1.0)),
            tooltip=[
                alt.Tooltip("operator:N"),
                alt.Tooltip("row:N", title="where"),
                alt.Tooltip("start:Q", title="start (ms)", format=".4f"),
                alt.Tooltip("duration:Q", title="duration (ms)", format=".4f"),
                alt.Tooltip("bytes:Q", format=","),
                alt.Tooltip("flops:Q", title="FLOP", format=".3s"),
                alt.Tooltip("partners:N", title="with"),
            ],
        )
        .add_params(zoom)
    )
    sent = (
        alt.Chart(alt.Data(values=list(lines)))
        .mark_rule(clip=True, strokeWidth=1.3, opacity=0.9)
        .encode(x="start:Q", x2="end:Q", y=alt.Y("from:N", sort=None, scale=order), y2="to:N")
    )
    chart = alt.layer(boxes, sent) if sent.data.values else boxes
    return chart.properties(width="container", height=_ROW * len(rows)).to_dict(validate=False)
