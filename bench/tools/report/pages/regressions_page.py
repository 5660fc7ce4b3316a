"""The page of regressions: gates against their baselines, and the history of metrics over commits,
drawn with their steps and targets.

Series with a step or a target are drawn one beside the other, by suite and metric; an exact series without
either is as good as constant, so that a line of a table says all of it. Measured ones are drawn too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from spbench.bench.tools.changes.history import Assessment, counts
from spbench.bench.tools.changes.series import Series, Step
from spbench.bench.tools.report.drawings import history_figure, label_of, svg
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import DataTable, Figure, Page
from spbench.bench.tools.report.what_changed import PAGE, assessed, gates
from spbench.plots.series import grouped

#: of drawings of one group, the panels; further series are in the table alone
MOST_PANELS = 12


def pages(gathered: Gathered) -> Iterator[Page]:
    """regressions.html."""
    history, problem, assessments = assessed(gathered.history)
    yield Page(
        PAGE,
        "Regressions",
        "regressions.md",
        {
            "gates": list(gates(gathered.baseline, gathered.results / "runs")),
            "folder": gathered.baseline,
            "history": history,
            "problem": problem,
            "records": f"{gathered.results}/history",
            "counts": counts(assessments),
            "series": len(assessments),
            "drawings": [*history_drawings(assessments)],
            "others": quiet_table(assessments),
            "quiet": [*history_drawings(assessments, quiet=True)],
        },
        order=80,
        summary="What is worse than it was: results beside committed baselines, and metrics over commits.",
    )


def history_drawings(assessments: Sequence[Assessment], *, quiet: bool = False) -> Iterator[DataTable]:
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
        panels, unit = group[:MOST_PANELS], group[0].series.unit
        more = f"; {len(group) - len(panels)} more in the table" if len(group) > len(panels) else ""
        dates = {
            p.commit.hash: p.commit.date
            for a in assessments
            if a.series.suite == suite
            for p in a.series.points
        }
        places = {name: at for at, name in enumerate(sorted(dates, key=lambda name: (dates[name], name)))}
        caption = f"{metric} of {suite} over commits{f', in {unit}' if unit else ''}{more}"
        name = f"{'quiet' if quiet else 'steps'}-{number}"
        alt = f"A line for each of {len(panels)} series; " + "; ".join(map(_said, panels))
        drawn = Figure(f"figures/history-{name}.svg", svg(history_figure(panels, places)), caption, alt)
        yield DataTable(name, caption, list(map(_level, group)) if quiet else step_lines(group), drawn=drawn)


def is_notable(assessment: Assessment) -> bool:
    """Whether a series has a step or a target."""
    return bool(assessment.steps or assessment.targets)


def _said(of: Assessment) -> str:
    steps = (f"{s.verdict} {of.series.difference(s.before, s.after)} in {s.commit_range}" for s in of.steps)
    return f"{label_of(of.series)}: {', '.join(steps) or 'no step'}"


def step_lines(group: Iterable[Assessment]) -> list[dict[str, Any]]:
    """The steps of series as lines of a table; a series with a target alone has a line too."""
    lines = []
    for of in group:
        series, standing = of.series, {id(step) for step in of.regressions}
        target = ", ".join(series.spelled(t.value) for t in of.targets) + " is missed" * bool(of.missed)
        about = {"cell": series.cell, "machine": series.machine, "metric": series.metric.name}
        for step in of.steps or [None]:
            lines.append(about | _step_line(series, step, id(step) in standing) | {"target": target})
    return lines


def _step_line(series: Series, step: Step | None, stands: bool) -> dict[str, Any]:
    if step is None:
        return dict.fromkeys(("step", "change", "commits", "before", "after", "also changed"), "")
    word = f"meant: {step.meant}" if step.meant else f"{step.verdict}{', stands' if stands else ''}"
    return {
        "step": word + " (drift)" * bool(step.drift),
        "change": series.difference(step.before, step.after),
        "commits": step.commit_range,
        "before": series.spelled(step.before),
        "after": series.spelled(step.after),
        "also changed": ", ".join(f"{name} {a} to {b}" for name, (a, b) in step.also_changed.items()),
    }


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
