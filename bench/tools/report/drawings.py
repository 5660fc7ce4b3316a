"""Drawings for pages, as SVG in the style of the suite's figures: one layer of a strategy (kernels and
messages of each rank over time), and metrics over commits."""

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from math import ceil, nan
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Patch

from spbench.bench.tools.changes.history import Assessment
from spbench.bench.tools.changes.series import STATUS, Series
from spbench.bench.tools.report.page import DataTable, Figure
from spbench.bench.yaml_files import read_yaml
from spbench.impls import WIRE_SHARE
from spbench.plots.paper import add_legend, house_style, new_figure
from spbench.plots.series import grouped
from spbench.plots.style import GREY, INK, shortened

#: inches: a drawing's width, and the heights of a row of bars, of axes around rows, and of a history's panel
_WIDTH, _ROW, _AROUND, _PANEL = 10.0, 0.16, 0.7, 1.9
WAIT = "wait"
_COLOURS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("colours.yaml"))
_VERDICTS: Mapping[str, str] = _COLOURS["verdicts"]
_COLLECTIVES = [name.replace("_", "-") for name in WIRE_SHARE]
_OF_KINDS = {
    **_COLOURS["kernels"],
    **dict(zip(_COLLECTIVES, cycle(_COLOURS["collectives"]), strict=False)),
    WAIT: _COLOURS["wait"],
}
#: the number of panels in a row, and of characters of a commit's hash
_ACROSS, _SHORT = 3, 7


def svg(figure: Drawing) -> bytes:
    """The figure as the bytes of an SVG file; the same figure always gives the same bytes."""
    content = io.BytesIO()
    with house_style(), rc_context({"svg.fonttype": "none"}):  # text instead of paths keeps files small
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


Bar = dict[str, Any]
#: the significant digits of times in a drawing
_DIGITS = 9
#: the fields of a bar that the table shows
_COLUMNS = ("row", "phase", "operator", "kind", "start", "duration", "bytes", "partners")


def layer_table(trace: Mapping[str, Any], strategy: str, name: str, model: str) -> DataTable:
    """A table of the events of each rank in the forward and backward of one layer, with a drawing of them.

    Args:
        trace: a trace from :func:`tools.papers.reproductions.read_trace`.
        name: the name of the table on the strategy's page.
        model: the model in words, for the caption.
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
    """A bar for each event of each rank that takes time: ``rank``, ``lane`` (0: the compute stream), ``row``
    (the label of rank and lane), ``phase``, ``operator``, ``kind``, ``start``, ``end`` and ``duration`` in
    ms, ``bytes``, ``flops``, ``partners`` (a text that names the other ranks), and of a message ``source``
    and ``destination``, which are ranks."""
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
    """The bar of each message's send, with the entries ``from`` and ``to``: the rows of the sender and of the
    receiver. The message is drawn as a line between these rows."""

    def message(bar: Bar) -> tuple[Any, ...]:
        return bar["source"], bar["destination"], bar["start"], bar["end"]

    received = {message(bar): bar for bar in bars if bar["kind"] == "recv"}
    for bar in bars:
        if bar["kind"] == "send" and (receiver := received.get(message(bar))):
            yield {**bar, "from": bar["row"], "to": receiver["row"]}


def layer_figure(bars: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> Drawing:
    """A panel for each phase of a layer, with a row for each stream of each rank over time in ms.

    Args:
        bars: bars of some phases, from :func:`bars_of`.
        messages: messages between rows, from :func:`messages`.
    """
    ordered = sorted(bars, key=lambda bar: (bar["rank"], bar["lane"]))
    rows = {row: at for at, row in enumerate(dict.fromkeys(bar["row"] for bar in ordered))}
    phases = grouped(bars, lambda bar: bar["phase"])
    with house_style():
        figure = new_figure(_WIDTH, len(phases) * (_AROUND + _ROW * len(rows)), "")
        panels = figure.subplots(len(phases), squeeze=False)[:, 0]
        for ax, (phase, of_phase) in zip(panels, phases.items(), strict=True):
            for (row, kind), alike in grouped(of_phase, lambda bar: (bar["row"], bar["kind"])).items():
                # one line with gaps takes far less room in a file than a rectangle for each bar
                ends = [end for bar in alike for end in (bar["start"], bar["end"], nan)]
                faint, height = 0.3 if kind == WAIT else 1.0, 0.75 * 72 * _ROW
                (line,) = ax.plot(ends, [rows[row]] * len(ends), color=_OF_KINDS[kind], alpha=faint, gid=kind)
                line.set(linewidth=height, solid_capstyle="butt")
            for each in messages:
                if each["phase"] == phase:
                    times, places = [each["start"], each["end"]], [rows[each["from"]], rows[each["to"]]]
                    ax.plot(times, places, color=INK, linewidth=0.8, gid="message")
            ax.set_yticks(range(len(rows)), rows)
            ax.set(ylim=(len(rows) - 0.5, -0.5), title=phase, xlabel="ms from the step's start")
            ax.margins(x=0)
            ax.grid(visible=False, axis="y")
        kinds = {bar["kind"] for bar in bars}
        add_legend(
            figure, [Patch(color=color, label=kind) for kind, color in _OF_KINDS.items() if kind in kinds]
        )
    return figure


# -- metrics over commits --------------------------------------------------------------------------------


def label_of(series: Series) -> str:
    """The title of a series' panel: the cell, and the machine if the metric was measured on one machine."""
    return f"{series.cell} on {series.machine}" if series.machine else series.cell


def history_figure(assessments: Sequence[Assessment], places: Mapping[str, int]) -> Drawing:
    """A panel for each series: its values over commits, the ranges of commits that contain a step's cause,
    and its targets.

    Args:
        places: the position of each commit along the x axis, by hash.
    """
    down = ceil(len(assessments) / _ACROSS)
    with house_style():
        figure = new_figure(_WIDTH, _PANEL * down, "")
        for at, assessment in enumerate(assessments, 1):
            _draw_series(figure.add_subplot(down, _ACROSS, at), assessment, places)
        handles = [Patch(color=color, alpha=0.35, label=name) for name, color in _VERDICTS.items()]
        add_legend(figure, handles if any(each.steps for each in assessments) else [])
    return figure


def _draw_series(ax: Axes, assessment: Assessment, places: Mapping[str, int]) -> None:
    series = assessment.series
    across = [places[point.commit.hash] for point in series.points]
    for step in assessment.steps:
        begin, end = (places[point.commit.hash] for point in (step.last_before, step.first_after))
        kind = "meant" if step.meant else step.verdict
        ax.axvspan(begin, end, color=_VERDICTS[kind], alpha=0.35, linewidth=0, gid=f"{kind} {begin} {end}")
        size = series.difference(step.before, step.after)
        ax.annotate(
            size, (end, 0.5), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points"
        )
    for target in assessment.targets:
        ax.axhline(target.value, color=_COLOURS["target"], linestyle="--", gid=f"target {target.value:g}")
    style = "steps-post" if series.exact else "default"
    values = [point.value for point in series.points]
    ax.plot(across, values, color=_COLOURS["line"], drawstyle=style, marker=".", markersize=3, gid="values")
    ax.set_title(shortened(label_of(series), 44, 2), color=GREY)
    ends = {across[0]: series.points[0].commit, across[-1]: series.points[-1].commit}
    ax.set_xticks([*ends], [f"{commit.hash[:_SHORT]}\n{commit.date[:10]}" for commit in ends.values()])
    if series.metric is STATUS:
        ax.set_yticks(sorted({*values}), [series.spelled(value) for value in sorted({*values})])
