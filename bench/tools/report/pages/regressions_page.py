"""The page of regressions: gates against their baselines, and the history of metrics over commits,
drawn with their steps and targets.

Series with a step or a target are drawn one beside the other, by suite and metric; an exact series without
either is as good as constant, so that a line of a table says all of it. Measured ones are drawn too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from spbench.bench.tools.changes.history import Assessment, History, counts
from spbench.bench.tools.changes.series import STATUS, Series, Step
from spbench.bench.tools.report import report_markdown as md
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import AXIS, DataTable, Drawing, Page, Part, Svg, ticks
from spbench.bench.tools.report.what_changed import PAGE, Gate, assessed, gates
from spbench.plots.series import grouped

_COLUMNS = {"worse": "worse", "removed": "missing", "improved": "better", "new": "new", "unchanged": "equal"}


def pages(gathered: Gathered) -> Iterator[Page]:
    """regressions.html."""
    history, problem, assessments = assessed(gathered.history)
    all_gates = list(gates(gathered.baseline, gathered.results / "runs"))
    folder = md.code(gathered.baseline)
    missing = f"There is no baseline in {folder}; `spbench baseline --scenario gate` writes one."
    yield Page(
        PAGE,
        "Regressions",
        "regressions.md",
        {
            "facts": md.listed(_facts(all_gates, history, assessments)),
            "gates": md.markdown_table(map(_gate_line, all_gates)) or missing,
            "differences": [*_differences(all_gates)],
            "history": _history(history, assessments) if history else _no_history(problem, gathered),
        },
        order=80,
        summary="What is worse than it was: results beside committed baselines, and metrics over commits.",
    )


def _facts(
    all_gates: Sequence[Gate], history: History | None, assessments: Sequence[Assessment]
) -> Iterator[str]:
    judged = [gate.judgement for gate in all_gates if gate.judgement is not None]
    worse = sum(judgement.fails for judgement in judged)
    if judged:
        text = _counted(worse, f"{worse} of {len(judged)}")
        yield f"{text} results are worse than their baselines; {len(all_gates)} baselines in all"
    else:
        text = md.marked("unjudged", "Not judged")
        yield f"{text}: no results of this code beside {len(all_gates)} baselines"
    if history:
        of = counts(assessments)
        commits = len({record.commit.hash for record in history.records})
        yield f"{_counted(of['standing'])} regressions of the history stand"
        yield f"{_counted(of['missed'])} targets missed"
        series = f"{len(assessments)} series over {commits} commits"
        yield f"**{of['steps']}** steps in {series}, {of['meant']} of them meant"


def _counted(bad: int, text: str = "") -> str:
    return md.marked("bad" if bad else "good", text or bad)


def _gate_line(gate: Gate) -> dict[str, Any]:
    """A baseline as a line of a table, in Markdown."""
    if gate.judgement:
        fails = gate.judgement.fails
        verdict = md.marked("bad" if fails else "good", "worse" if fails else "not worse")
    else:
        verdict = md.marked("unjudged", "not judged" if gate.was_run else "not run")
    machines, of_base = (md.plain("; ".join(some)) for some in reversed(gate.machines))
    return {
        "baseline": md.link(gate.scenario, f"#{gate.table_name}") if gate.lines else md.plain(gate.scenario),
        "verdict": verdict,
        **{head: str(gate.counts[of]) if gate.judgement else "" for head, of in _COLUMNS.items()},
        "base commit": md.codes(map(md.dated, gate.commits[0])) or "unknown",
        "head commit": md.codes(map(md.dated, gate.commits[1])) or ("unknown" if gate.judgement else ""),
        "machine": f"{machines}; of the baseline: {of_base}" if of_base else machines,
    }


def _differences(all_gates: Sequence[Gate]) -> Iterator[Part]:
    for gate in all_gates:
        if lines := gate.lines:
            caption = f"{gate.scenario}: what differs from the baseline, the worst first"
            yield DataTable(gate.table_name, caption, lines, sortable=len(lines) > 1)
        notes = gate.judgement.notes if gate.judgement else [gate.problem]
        yield md.listed(f"{md.code(gate.scenario)}: {md.plain(note)}" for note in notes)


def _no_history(problem: str, gathered: Gathered) -> str:
    folder = f"{gathered.results}/history"
    return f"""{md.plain(problem)} A history is a folder of records, one for each run of a suite:

    spbench run --scenario gate --output results/runs/gate
    spbench record results/runs/gate --history {folder}
    spbench report --output DIR --history {folder}
"""


def _history(history: History, assessments: Sequence[Assessment]) -> Iterator[Part]:
    branch, *others = history.branches
    machines = md.codes(sorted({record.machine_name for record in history.records})) or "unknown"
    yield f"""Branch {md.code(branch)}; machines: {machines}. A shaded range holds the commit of a step: of an
exact metric it lies between two neighbours, of a measured one it is as wide as noise makes it. Dashed lines
are targets. Point at a mark to see its commit. That a step was meant is said in
{md.code(f"{history.folder}/meant.yaml")}."""
    if others:
        yield f"Records of {md.plain(', '.join(others))} are left out."
    drawings: list[Part] = [*history_drawings(assessments)]
    yield from drawings or [md.marked("good", "No series has a step or a target.")]
    if table := quiet_table(assessments):
        yield "### Series without a step or a target {#unchanged}"
        yield table
        yield from history_drawings(assessments, quiet=True)


#: of drawings of one group, the panels; further series are in the table alone
MOST_PANELS = 12
_COLORS = {"regression": "#c2362b", "improvement": "#2a9d55", "meant": "#8d95a0"}
_LINE, _TARGET = "#3b7dd8", "#b5651d"
#: pixels of a panel: the left edge of the plot, its width, its top and its height
_LEFT, _WIDTH, _TOP, _HEIGHT = 70, 340, 18, 150
_SHORT = 7


def places_of(assessments: Iterable[Assessment]) -> dict[str, int]:
    """The place of each commit among those of the series, by hash, in the order of dates."""
    dates = {p.commit.hash: p.commit.date for a in assessments for p in a.series.points}
    return {name: place for place, name in enumerate(sorted(dates, key=lambda name: (dates[name], name)))}


def history_drawings(assessments: Sequence[Assessment], *, quiet: bool = False) -> Iterator[Drawing]:
    """A drawing for each suite and metric, with a panel for each series that has a step or a target; those
    with a regression that stands or a target that is missed come first.

    Args:
        quiet: the measured series that have neither, in place of these.
    """
    chosen = [
        a for a in assessments if (not a.series.exact and not is_notable(a) if quiet else is_notable(a))
    ]
    groups = grouped(chosen, lambda a: (a.series.suite, a.series.metric.name))
    ordered = sorted(groups.items(), key=lambda entry: (not any(a.fails for a in entry[1]), entry[0]))
    for number, ((suite, metric), group) in enumerate(ordered, start=1):
        group.sort(key=lambda assessment: not assessment.fails)
        drawn, unit = group[:MOST_PANELS], group[0].series.unit
        more = f"; {len(group) - len(drawn)} more in the table" if len(group) > len(drawn) else ""
        places = places_of(a for a in assessments if a.series.suite == suite)
        caption = f"{metric} of {suite} over commits{f', in {unit}' if unit else ''}{more}"
        name = f"{'quiet' if quiet else 'steps'}-{number}"
        yield Drawing(
            f"A line for each of {len(drawn)} series; " + "; ".join(map(_said, drawn)),
            [(label_of(a.series), _panel(a, places)) for a in drawn],
            DataTable(name, caption, [_level(a) for a in group] if quiet else step_lines(group)),
            {**_COLORS, "target": _TARGET} if not quiet else {},
        )


def is_notable(assessment: Assessment) -> bool:
    """Whether a series has a step or a target."""
    return bool(assessment.steps or assessment.targets)


def label_of(series: Series) -> str:
    """The cell, and the machine if the metric was measured on one."""
    return f"{series.cell} on {series.machine}" if series.machine else series.cell


def _said(of: Assessment) -> str:
    steps = (f"{step.verdict} {_size(of.series, step)} in {step.commit_range}" for step in of.steps)
    return f"{label_of(of.series)}: {', '.join(steps) or 'no step'}"


def step_lines(group: Iterable[Assessment]) -> list[dict[str, Any]]:
    """The steps of series as lines of a table; a series with a target alone has a line too."""
    lines = []
    for of in group:
        series, stands = of.series, {id(step) for step in of.regressions}
        target = ", ".join(series.spelled(t.value) for t in of.targets) + " is missed" * bool(of.missed)
        about = {"cell": series.cell, "machine": series.machine, "metric": series.metric.name}
        for step in of.steps or [None]:
            lines.append(about | _step_line(series, step, id(step) in stands) | {"target": target})
    return lines


def _step_line(series: Series, step: Step | None, stands: bool) -> dict[str, Any]:
    if step is None:
        return dict.fromkeys(("step", "change", "commits", "before", "after", "also changed"), "")
    word = f"meant: {step.meant}" if step.meant else f"{step.verdict}{', stands' if stands else ''}"
    return {
        "step": word + " (drift)" * bool(step.drift),
        "change": _size(series, step),
        "commits": step.commit_range,
        "before": series.spelled(step.before),
        "after": series.spelled(step.after),
        "also changed": ", ".join(f"{name} {a} to {b}" for name, (a, b) in step.also_changed.items()),
    }


def _size(series: Series, step: Step) -> str:
    """How large a step is: in percent, or from what to what where that says nothing."""
    if series.metric is STATUS or not math.isfinite(step.change):
        return f"{series.spelled(step.before)} to {series.spelled(step.after)}"
    return f"{step.change * 100:+.3g}%"


def quiet_table(assessments: Sequence[Assessment]) -> DataTable | None:
    """The series without a step or a target; None: there is none."""
    lines = [_level(a) for a in assessments if not is_notable(a)]
    caption = "Series without a step or a target: the present value, and the range over all commits"
    return DataTable("others", caption, lines, sortable=True) if lines else None


def _level(assessment: Assessment) -> dict[str, Any]:
    series, values = assessment.series, [point.value for point in assessment.series.points]
    return {
        "suite": series.suite,
        "metric": series.metric.name,
        "series": label_of(series),
        "now": series.spelled(series.current),
        "unit": series.unit,
        "commits": len(values),
        "lowest": series.spelled(min(values)),
        "highest": series.spelled(max(values)),
    }


def _panel(assessment: Assessment, places: Mapping[str, int]) -> str:
    """A line over commits at equal distances; behind it the ranges of its steps, and lines at its targets.
    A range holds the commit of a step."""
    series, targets = assessment.series, [target.value for target in assessment.targets]
    values = [*(point.value for point in series.points), *targets]
    low, high = min(values), max(values)
    low, high = (low - 1, high + 1) if low == high else (low, high)

    def x(commit: str) -> float:
        return _LEFT + places[commit] * _WIDTH / max(1, len(places) - 1)

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1 - (value - low) / (high - low))

    svg = Svg(_LEFT + _WIDTH + 40, _TOP + _HEIGHT + AXIS)
    for step in assessment.steps:
        begin, end = (x(point.commit.hash) for point in (step.last_before, step.first_after))
        kind, size = "meant" if step.meant else step.verdict, _size(series, step)
        title = f"{kind} {size} in {step.commit_range}{step.meant and ': ' + step.meant}"
        svg.rect((begin, _TOP, end - begin, _HEIGHT), _COLORS[kind], title, 0.35)
        svg.text((begin + end) / 2, _TOP - 4, size, "middle")
    for value in sorted({*values}) if series.metric is STATUS else ticks(low, high, 4):
        text = series.spelled(value) if series.metric is STATUS or abs(value) < 1e4 else f"{value:.4g}"
        svg.line([(_LEFT - 5, y(value)), (_LEFT, y(value))]).text(_LEFT - 8, y(value) + 4, text, "end")
    for value in targets:
        title = f"target {series.spelled(value)}"
        svg.line([(_LEFT, y(value)), (_LEFT + _WIDTH, y(value))], _TARGET, title, dashed=True)
    points = [(x(point.commit.hash), y(point.value)) for point in series.points]
    svg.line(_stairs(points) if series.exact else points, _LINE)
    for (left, top), point in zip(points, series.points, strict=True):
        at = f"{point.commit.short} of {point.commit.date[:10]}"
        svg.dot(left, top, _LINE, f"{at}: {series.spelled(point.value)} {series.unit}".strip())
    foot = _TOP + _HEIGHT
    for point, anchor in ((series.points[0], "start"), (series.points[-1], "end")):
        text = f"{point.commit.hash[:_SHORT]}, {point.commit.date[:10]}"
        if anchor == "start" or len(series.points) > 1:
            svg.text(x(point.commit.hash), foot + 18, text, anchor)
    return str(svg)


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points with the corners of a line that is level until the next one."""
    corners = [((left, top), (right, top)) for (left, top), (right, _) in pairwise(points)]
    return [*(point for both in corners for point in both), points[-1]]
