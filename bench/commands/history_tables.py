"""The tables of a history: a series commit by commit, many series at a glance, and their steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spbench.bench.commands.output import Table

if TYPE_CHECKING:
    from spbench.bench.history.expectations import Target
    from spbench.bench.history.history import Assessment
    from spbench.bench.history.series import Series
    from spbench.bench.history.steps import Step

#: series at most that are shown commit by commit
_IN_FULL = 3

#: series at most of which an overview has the quiet ones too
_AT_A_GLANCE = 20


def sections(assessments: Sequence[Assessment]) -> list[Table]:
    """Tables for people: the series, then their steps."""
    if len(assessments) <= _IN_FULL:
        tables = [_over_commits(assessment) for assessment in assessments]
    else:
        tables = _overview(assessments)
    steps = [_step_line(a, step) for a in _worst_first(assessments) for step in reversed(a.steps)]
    return [*tables, Table("Steps, of each series the newest first", steps)] if steps else tables


def _over_commits(assessment: Assessment) -> Table:
    series = assessment.series
    lines = []
    before = None
    for point in series.points:
        came = [step for step in assessment.steps if step.first_after is point]
        lines.append(
            {
                "commit": point.commit.short,
                "date": point.commit.date[:16].replace("T", " "),
                "value": series.spelled(point.value),
                "change": None if before is None else _difference(series, before, point.value),
                "": "; ".join(_remark(step) for step in came),
            }
        )
        before = point.value
    machine = f", {series.machine}" if series.machine else ""
    unit = f" ({series.unit})" if series.unit else ""
    targets = "".join(f"; {_target(series, target)}" for target in assessment.targets)
    return Table(f"{series.metric.name}{unit} of {series.cell}, {series.suite}{machine}{targets}", lines)


def _overview(assessments: Sequence[Assessment]) -> list[Table]:
    shown = [a for a in _worst_first(assessments) if a.steps or a.targets or len(assessments) <= _AT_A_GLANCE]
    lines = [
        {
            "metric": a.series.metric.name,
            "first": a.series.spelled(a.series.points[0].value),
            "last": a.series.spelled(a.series.points[-1].value),
            "unit": a.series.unit,
            "commits": len(a.series.points),
            "steps": len(a.steps),
            "target": "; ".join(_target(a.series, target) for target in a.targets),
            "machine": a.series.machine,
            "cell": a.series.cell,
            "suite": a.series.suite,
        }
        for a in shown
    ]
    quiet = len(assessments) - len(shown)
    title = f"Series{f' with steps or targets ({quiet} others have none)' if quiet else ''}"
    return [Table(title, lines)] if lines else []


def _worst_first(assessments: Sequence[Assessment]) -> list[Assessment]:
    return sorted(assessments, key=lambda a: (not a.fails, not a.steps))


def _step_line(assessment: Assessment, step: Step) -> dict[str, Any]:
    series = assessment.series
    return {
        "": f"{step.verdict}{' (meant)' if step.meant else ''}",
        "metric": series.metric.name,
        "before": series.spelled(step.before),
        "after": series.spelled(step.after),
        "change": _difference(series, step.before, step.after),
        "commits": step.commit_range,
        "kind": "drift" if step.drift else "step",
        "meant": step.meant,
        "also changed": ", ".join(f"{name} {a} to {b}" for name, (a, b) in step.also_changed.items()),
        "machine": series.machine,
        "cell": series.cell,
    }


def _remark(step: Step) -> str:
    kind = f"{step.verdict}, a drift" if step.drift else step.verdict
    return f"{kind}: {step.commit_range}" + (f" (meant: {step.meant})" if step.meant else "")


def _target(series: Series, target: Target) -> str:
    limit = "at most" if series.metric.better == "smaller" else "at least"
    missed = ": MISSED" if target.is_missed(series) else ""
    return f"{limit} {series.spelled(target.value)}{missed}"


def _difference(series: Series, before: float, after: float) -> str:
    """A change as people read it: in percent; in units where that would be next to nothing."""
    if before == after or series.metric.name == "status":
        return ""
    change = (after - before) / abs(before) if before else math.inf
    if 1e-4 <= abs(change) < math.inf:
        return f"{change:+.2%}"
    return f"{after - before:+.6g} {series.unit}".strip()


# -- for programs ----------------------------------------------------------------------------------------


def as_records(assessments: Sequence[Assessment]) -> list[dict[str, Any]]:
    """A line for each point, with the step that it is the first after."""
    return [line for assessment in assessments for line in _records(assessment)]


def _records(assessment: Assessment) -> Iterator[dict[str, Any]]:
    series = assessment.series
    for point in series.points:
        step = next((step for step in assessment.steps if step.first_after is point), None)
        yield {
            **_names(series),
            "commit": point.commit.hash,
            "date": point.commit.date,
            "value": point.value,
            "step": step.verdict if step else None,
            "commits": step.commit_range if step else None,
            "meant": step.meant if step else None,
        }


def _names(series: Series) -> dict[str, str]:
    return {
        "suite": series.suite,
        "machine": series.machine,
        "cell": series.cell,
        "metric": series.metric.name,
        "unit": series.unit,
    }


def as_content(assessments: Sequence[Assessment]) -> dict[str, Any]:
    """All series with their points, steps and targets."""
    return {"series": [_content(assessment) for assessment in assessments]}


def _content(assessment: Assessment) -> dict[str, Any]:
    series = assessment.series
    return {
        **_names(series),
        "better": series.metric.better,
        "exact": series.exact,
        "fails": assessment.fails,
        "points": [
            {"commit": point.commit.hash, "date": point.commit.date, "value": point.value}
            for point in series.points
        ],
        "steps": [_step_content(step) for step in assessment.steps],
        "targets": [
            {"value": target.value, "missed": target in assessment.missed} for target in assessment.targets
        ],
    }


def _step_content(step: Step) -> dict[str, Any]:
    return {
        "verdict": step.verdict,
        "drift": step.drift,
        "commits": step.commit_range,
        "last_before": asdict(step.last_before.commit),
        "first_after": asdict(step.first_after.commit),
        "before": step.before,
        "after": step.after,
        "change": step.change if math.isfinite(step.change) else None,
        "also_changed": step.also_changed,
        "meant": step.meant,
    }
