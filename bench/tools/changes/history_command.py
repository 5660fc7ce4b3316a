"""`spbench history`: metrics over commits, and where they changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spbench.bench.command_line.options import printed
from spbench.bench.command_line.output import Output, Table
from spbench.bench.tools.changes.history_changes import changes_table, difference, target_text

if TYPE_CHECKING:
    from spbench.bench.tools.changes.history import Assessment, History
    from spbench.bench.tools.changes.series import Series
    from spbench.bench.tools.changes.steps import Step

#: series at most that are shown commit by commit, and of which an overview has the quiet ones too
_IN_FULL, _AT_A_GLANCE = 3, 20


@click.command("history")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--suite", help="Only this suite.")
@click.option("--metric", help="Only this metric, such as step_time_s, or status.")
@click.option("--cell", default="", metavar="TEXT", help="Only cells that have this in their key.")
@click.option("--machine", help="Only timings of this machine, as the tables name it.")
@click.option("--branch", help="Records of this branch; if left out, of that with the most records.")
@click.option(
    "--fail-on-regression",
    is_flag=True,
    help="Exit code 1 if a metric is worse than before a step that is not said to be meant, or misses its "
    "target.",
)
@printed
def command(folder: Path, branch: str | None, fail_on_regression: bool, **wanted: Any) -> Output:
    """Show metrics over the commits in FOLDER, and their steps.

    Three series or fewer are shown commit by commit, of more what changed, by strategy; the series are
    details. A step has the range of commits that holds its cause, for git log. FOLDER/targets.yaml has values
    that must be met, FOLDER/meant.yaml the steps that were meant.
    """
    from spbench.bench.tools.changes.history import read_history

    history = read_history(folder)
    branch = branch if branch is not None else history.branches[0]
    assessments = [history.assess(series) for series in history.series(branch=branch, **wanted)]
    failing = [assessment for assessment in assessments if assessment.fails]
    in_full = len(assessments) <= _IN_FULL
    by_series = _sections(assessments)
    return Output(
        by_series if in_full else [*changes_table(assessments)],
        {"branch": branch, "fails": bool(failing), "series": list(map(_content, assessments))},
        [line for assessment in assessments for line in _records(assessment)],
        notes=[*_asides(history, branch), *_hints(folder, failing), _summary(assessments)],
        code=int(fail_on_regression and bool(failing)),
        details=[] if in_full else by_series,
    )


def _asides(history: History, branch: str) -> list[str]:
    """What was passed over."""
    others = [name for name in history.branches if name != branch]
    left_out = sum(record.commit.branch != branch for record in history.records)
    lines = []
    if others:
        lines.append(f"note: branch {branch}; {_count(left_out, 'record')} of {', '.join(others)} left out")
    known = {record.commit.hash for record in history.records}
    for entry in history.meant:
        if not any(name.startswith(entry.commit) for name in known):
            lines.append(f"warning: no record of commit {entry.commit}, which was meant: {entry.reason}")
    return lines


def _hints(folder: Path, failing: Sequence[Assessment]) -> list[str]:
    """How to say that the first regression was meant."""
    for assessment in failing:
        for step in assessment.regressions:
            commit, metric = step.first_after.commit.short, assessment.series.metric.name
            return [
                f"if the change was meant, add to meant: in {folder / 'meant.yaml'}: "
                f"- {{commit: '{commit}', metric: {metric}, reason: ...}}"
            ]
    return []


def _summary(assessments: Sequence[Assessment]) -> str:
    from spbench.bench.tools.changes.history import counts

    standing, missed, steps, meant = counts(assessments).values()
    series = f"{len(assessments)} series, {_count(steps, 'step')}, {meant} of them meant"
    if not standing and not missed:
        return f"no regression: {series}"
    return f"REGRESSION: {_count(standing, 'regression')}, {_count(missed, 'missed target')}; {series}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# -- tables: a series commit by commit, many series at a glance, and their steps -------------------------


def _sections(assessments: Sequence[Assessment]) -> list[Table]:
    """Tables for people: the series, then their steps."""
    if len(assessments) <= _IN_FULL:
        tables = [_over_commits(assessment) for assessment in assessments]
    else:
        tables = _overview(assessments)
    steps = [_step_line(a, step) for a in _worst_first(assessments) for step in reversed(a.steps)]
    important = ("", "metric", "change", "commits", "before", "after")
    title = "Steps, of each series the newest first"
    return [*tables, Table(title, steps, important, ("cell", "meant", "also changed"))] if steps else tables


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
                "change": None if before is None else difference(series, before, point.value),
                "": "; ".join(_remark(step) for step in came),
            }
        )
        before = point.value
    machine = f", {series.machine}" if series.machine else ""
    unit = f" ({series.unit})" if series.unit else ""
    targets = "".join(f"; {target_text(series, target)}" for target in assessment.targets)
    title = f"{series.metric.name}{unit} of {series.cell}, {series.suite}{machine}{targets}"
    return Table(title, lines, below=("",))


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
            "target": "; ".join(target_text(a.series, target) for target in a.targets),
            "machine": a.series.machine,
            "cell": a.series.cell,
            "suite": a.series.suite,
        }
        for a in shown
    ]
    quiet = len(assessments) - len(shown)
    title = f"Series{f' with steps or targets ({quiet} others have none)' if quiet else ''}"
    important = ("metric", "first", "last", "unit", "steps", "target")
    return [Table(title, lines, important, ("cell",))] if lines else []


def _worst_first(assessments: Sequence[Assessment]) -> list[Assessment]:
    return sorted(assessments, key=lambda a: (not a.fails, not a.steps))


def _step_line(assessment: Assessment, step: Step) -> dict[str, Any]:
    series = assessment.series
    return {
        "": f"{step.verdict}{' (meant)' if step.meant else ''}",
        "metric": series.metric.name,
        "before": series.spelled(step.before),
        "after": series.spelled(step.after),
        "change": difference(series, step.before, step.after),
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


# -- for programs ----------------------------------------------------------------------------------------


def _records(assessment: Assessment) -> Iterator[dict[str, Any]]:
    """A line for each point, with the step that it is the first after."""
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


def _content(assessment: Assessment) -> dict[str, Any]:
    """A series with its points, steps and targets."""
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
        "change": step.change if isfinite(step.change) else None,
        "also_changed": step.also_changed,
        "meant": step.meant,
    }
