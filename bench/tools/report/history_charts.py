"""Charts of a history: metrics over commits, with their steps and targets.

Series with a step or a target are drawn one beside the other, by suite and metric. The others are chosen one
at a time; of an exact one only the values at which it changes are kept, as it is the same between these.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import altair as alt

from spbench.bench.tools.changes.history import Assessment
from spbench.bench.tools.changes.series import SHOWN_STATUSES, STATUS, Series, Step
from spbench.bench.tools.report.charts import selected, spec_of
from spbench.bench.tools.report.page import Chart, DataTable, LegendEntry, Panel, Selector

Line = dict[str, Any]

#: of charts of one group, the panels; further series are in the table alone
MOST_PANELS = 12
_COLORS = {"regression": "#c2362b", "improvement": "#2a9d55", "meant": "#8d95a0"}
_LINE, _TARGET = "#3b7dd8", "#b5651d"
_SHORT = 7
_HEIGHT = 170


def places_of(assessments: Iterable[Assessment]) -> dict[str, int]:
    """The place of each commit among those of the series, by hash, in the order of dates."""
    dates = {p.commit.hash: p.commit.date for a in assessments for p in a.series.points}
    return {name: place for place, name in enumerate(sorted(dates, key=lambda name: (dates[name], name)))}


def is_notable(assessment: Assessment) -> bool:
    """Whether a series has a step or a target."""
    return bool(assessment.steps or assessment.targets)


def notable_charts(assessments: Sequence[Assessment]) -> Iterator[Chart]:
    """A chart for each suite and metric of which some series has a step or a target, a panel a series; those
    with a regression that stands or a target that is missed come first."""
    groups: dict[tuple[str, str], list[Assessment]] = defaultdict(list)
    for assessment in filter(is_notable, assessments):
        groups[assessment.series.suite, assessment.series.metric.name].append(assessment)
    ordered = sorted(groups.items(), key=lambda entry: (not any(a.fails for a in entry[1]), entry[0]))
    for number, ((suite, metric), group) in enumerate(ordered, start=1):
        group.sort(key=lambda assessment: not assessment.fails)
        shown, unit = group[:MOST_PANELS], group[0].series.unit
        more = f"; {len(group) - len(shown)} more in the table" if len(group) > len(shown) else ""
        places = places_of(a for a in assessments if a.series.suite == suite)
        yield Chart(
            f"steps-{number}",
            f"{metric} of {suite} over commits{f', in {unit}' if unit else ''}{more}",
            f"A line for each of {len(shown)} series; " + "; ".join(map(_said, shown)),
            {},
            DataTable(f"steps-{number}-numbers", f"Steps of {metric} in {suite}", step_lines(group)),
            panels=[Panel(label_of(a.series), _panel(a, places)) for a in shown],
            legend=[
                *(LegendEntry(kind, "filled", color) for kind, color in _COLORS.items()),
                LegendEntry("target", "dashed", _TARGET),
            ],
        )


def label_of(series: Series) -> str:
    """The cell, and the machine if the metric was measured on one."""
    return f"{series.cell} on {series.machine}" if series.machine else series.cell


def _said(of: Assessment) -> str:
    steps = (f"{step.verdict} {_size(of.series, step)} in {step.commit_range}" for step in of.steps)
    return f"{label_of(of.series)}: {', '.join(steps) or 'no step'}"


def step_lines(group: Iterable[Assessment]) -> list[Line]:
    """The steps of series as lines of a table; a series with a target alone has a line too."""
    lines = []
    for of in group:
        series, stands = of.series, {id(step) for step in of.regressions}
        target = ", ".join(series.spelled(t.value) for t in of.targets) + " is missed" * bool(of.missed)
        about = {"cell": series.cell, "machine": series.machine, "metric": series.metric.name}
        for step in of.steps or [None]:
            lines.append(about | _step_line(series, step, id(step) in stands) | {"target": target})
    return lines


def _step_line(series: Series, step: Step | None, stands: bool) -> Line:
    if step is None:
        return dict.fromkeys(("step", "change", "commits", "before", "after", "also changed"), "")
    word = f"meant: {step.meant}" if step.meant else f"{step.verdict}{', stands' if stands else ''}"
    also = ", ".join(f"{name} {before} to {after}" for name, (before, after) in step.also_changed.items())
    return {
        "step": word + " (drift)" * bool(step.drift),
        "change": _size(series, step),
        "commits": step.commit_range,
        "before": series.spelled(step.before),
        "after": series.spelled(step.after),
        "also changed": also,
    }


def _size(series: Series, step: Step) -> str:
    """How large a step is: in percent, or from what to what where that says nothing."""
    if series.metric is STATUS or not math.isfinite(step.change):
        return f"{series.spelled(step.before)} to {series.spelled(step.after)}"
    return f"{step.change * 100:+.3g}%"


# -- the others ------------------------------------------------------------------------------------------


def others_chart(assessments: Sequence[Assessment]) -> Chart | None:
    """One series at a time of those without a step or a target; None: there is none."""
    others = [assessment.series for assessment in assessments if not is_notable(assessment)]
    if not others:
        return None
    places = {
        suite: places_of(a for a in assessments if a.series.suite == suite)
        for suite in {series.suite for series in others}
    }
    lines = [_series_line(series) for series in others]
    selectors = [
        Selector(field, field, [(value, value) for value in dict.fromkeys(line[field] for line in lines)])
        for field in ("suite", "metric", "series")
    ]
    values = [
        {**_point(series, point, places[series.suite]), **{s.field: line[s.field] for s in selectors}}
        for series, line in zip(others, lines, strict=True)
        for point in _changes(series)
    ]
    chart = alt.Chart(width="container", height=_HEIGHT + 60).mark_line(
        interpolate="step-after", color=_LINE, point={"color": _LINE, "size": 25}
    )
    days = {p.commit.hash: p.commit.date[:10] for series in others for p in series.points}
    names = json.dumps({suite: _names(of_suite, days) for suite, of_suite in places.items()})
    chart = chart.encode(x=_x(f"{names}[suite]"), y=_y("metric"), tooltip=_TOOLTIP)
    return Chart(
        "others",
        "A series without a step or a target, over commits",
        "A line of the chosen series over commits; it has no step.",
        spec_of(selected(chart, selectors), values),
        DataTable("others-numbers", "Series without a step or a target", lines, sortable=False),
        selectors,
    )


def _series_line(series: Series) -> Line:
    return {
        "suite": series.suite,
        "metric": series.metric.name,
        "series": label_of(series),
        "now": series.spelled(series.current),
        "unit": series.unit,
        "commits": len(series.points),
        "lowest": series.spelled(min(point.value for point in series.points)),
        "highest": series.spelled(max(point.value for point in series.points)),
    }


def _changes(series: Series) -> list[Any]:
    """The points of a series; of an exact one the first, the last, and those that differ from their
    predecessors."""
    points = series.points
    changed = (
        after for before, after in pairwise(points) if after.value != before.value or after is points[-1]
    )
    return [*points[:1], *changed] if series.exact else list(points)


# -- a panel ---------------------------------------------------------------------------------------------

_TOOLTIP = [alt.Tooltip("commit:N"), alt.Tooltip("date:N"), alt.Tooltip("shown:N", title="value")]


def _point(series: Series, point: Any, places: Mapping[str, int]) -> Line:
    return {
        "place": places[point.commit.hash],
        "commit": point.commit.short,
        "date": point.commit.date[:10],
        "value": point.value,
        "shown": f"{series.spelled(point.value)} {series.unit}".strip(),
    }


def _panel(assessment: Assessment, places: Mapping[str, int]) -> dict[str, Any]:
    """A line over commits; behind it the ranges of its steps, and lines at its targets."""
    series = assessment.series
    days = {point.commit.hash: point.commit.date[:10] for point in series.points}
    x = _x(json.dumps(_names(places, days)), len(places))
    steps = [_range(series, step, places) for step in assessment.steps]
    points = [_point(series, point, places) for point in series.points]
    layers: list[Any] = []
    if steps:
        kinds = alt.Scale(domain=[*_COLORS], range=[*_COLORS.values()])
        spans = alt.Chart(alt.Data(values=steps)).encode(
            x="from:Q", color=alt.Color("kind:N", legend=None, scale=kinds)
        )
        ranges = spans.mark_rect(opacity=0.35)
        sizes = spans.mark_text(dy=-4, baseline="bottom", fontWeight="bold")
        layers.append(ranges.encode(x2="to:Q", tooltip=["kind:N", "change:N", "commits:N", "meant:N"]))
        layers.append(sizes.encode(x="middle:Q", y=alt.value(0), text="change:N"))
    line = alt.Chart(alt.Data(values=points)).encode(
        x=x, y=_y(json.dumps(series.metric.name)), tooltip=_TOOLTIP
    )
    layers.append(line.mark_line(interpolate="step-after" if series.exact else "linear", color=_LINE))
    layers.append(line.mark_circle(size=22, color=_LINE, opacity=1))
    if assessment.targets:
        levels = [{"value": of.value, "target": series.spelled(of.value)} for of in assessment.targets]
        rule = alt.Chart(alt.Data(values=levels)).mark_rule(strokeDash=[5, 4], color=_TARGET, strokeWidth=1.5)
        layers.append(rule.encode(y="value:Q", tooltip=["target:N"]))
    return alt.layer(*layers).properties(width="container", height=_HEIGHT).to_dict(validate=False)


def _range(series: Series, step: Step, places: Mapping[str, int]) -> Line:
    begin, end = (places[point.commit.hash] for point in (step.last_before, step.first_after))
    return {
        "from": begin,
        "to": end,
        "middle": (begin + end) / 2,
        "kind": "meant" if step.meant else step.verdict,
        "change": _size(series, step),
        "commits": step.commit_range,
        "meant": step.meant,
    }


def _names(places: Mapping[str, int], days: Mapping[str, str]) -> list[list[str]]:
    """The commits in order: the first digits of the hash, and below them the day."""
    return [[commit[:_SHORT], days.get(commit, "")] for commit in places]


def _x(names: str, commits: int | None = None) -> alt.X:
    """Commits at equal distances.

    Args:
        names: an expression for the list of their names.
        commits: how many there are, if they all are to be on the axis.
    """
    label = f"{names}[datum.value] || ''"
    axis = alt.Axis(labelExpr=label, tickMinStep=1, tickCount=4, labelFlush=True, labelOverlap=True)
    scale = alt.Scale(nice=False, domain=[0, commits - 1] if commits else alt.Undefined)
    return alt.X("place:Q", title=None, axis=axis, scale=scale)


def _y(metric: str) -> alt.Y:
    """Values; of statuses their names.

    Args:
        metric: an expression for the name of the metric.
    """
    status = f"{metric} === {json.dumps(STATUS.name)}"
    number = "format(datum.value, abs(datum.value) < 1 ? '~g' : '~s')"  # "520m" is no number to readers
    labels = f"{status} ? ({json.dumps(SHOWN_STATUSES)}[datum.value] || '') : {number}"
    axis = alt.Axis(labelExpr=labels, tickCount=4)
    return alt.Y("value:Q", title=None, axis=axis, scale=alt.Scale(zero=False, padding=12))
