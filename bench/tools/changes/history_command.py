"""`spbench history`: metrics over commits, and where they changed."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import click

from spbench.bench.command_line.options import printed
from spbench.bench.command_line.output import Output, Table
from spbench.bench.tools.changes.history import Assessment, History, Target, counts, read_history
from spbench.bench.tools.changes.metrics import TABLES
from spbench.bench.tools.changes.series import Series, Step
from spbench.plots.series import grouped

#: so many series or fewer are shown commit by commit; an overview of so many or fewer has quiet series too
_IN_FULL, _AT_A_GLANCE = 3, 20

#: the key of a cell has at least so many parts between slashes; the second part is the strategy
_PARTS_OF_A_KEY = 6


@click.command("history")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--suite", help="Only this suite.")
@click.option("--metric", help="Only this metric, such as step_time_s, or status.")
@click.option("--cell", default="", metavar="TEXT", help="Only cells that have this in their key.")
@click.option("--machine", help="Only times of this machine, by its name in the tables.")
@click.option("--branch", help="Only this branch; by default the branch with the most records.")
@click.option(
    "--fail-on-regression",
    is_flag=True,
    help="Exit with 1 if a metric became worse and meant.yaml does not say that this was meant, or if it "
    "misses its target.",
)
@printed
def command(folder: Path, branch: str | None, fail_on_regression: bool, **wanted: Any) -> Output:
    """Show metrics over the commits in FOLDER, and their steps.

    Up to three series are shown commit by commit. Of more series the command shows what changed, by strategy,
    and the series as details. A step has the range of commits that holds its cause, for git log.
    FOLDER/targets.yaml has values that must be met, FOLDER/meant.yaml the steps that were meant.
    """
    history = read_history(folder)
    branch = branch if branch is not None else history.branches[0]
    assessments = [history.assess(series) for series in history.series(branch=branch, **wanted)]
    failing = [assessment for assessment in assessments if assessment.fails]
    in_full = len(assessments) <= _IN_FULL
    by_series = [*_series_tables(assessments), *_steps_table(assessments)]
    return Output(
        by_series if in_full else [*changes_table(assessments)],
        {"branch": branch, "fails": bool(failing), "series": list(map(_content, assessments))},
        [line for assessment in assessments for line in _point_records(assessment)],
        notes=[*_asides(history, branch), *_hints(folder, failing), _summary(assessments)],
        code=int(fail_on_regression and bool(failing)),
        details=[] if in_full else by_series,
    )


def _asides(history: History, branch: str) -> Iterator[str]:
    """Notes: records of other branches that were left out, and accepted commits that have no record."""
    others = [name for name in history.branches if name != branch]
    left_out = sum(record.commit.branch != branch for record in history.records)
    if others:
        yield f"note: branch {branch}; {_count(left_out, 'record')} of {', '.join(others)} left out"
    hashes = {record.commit.hash for record in history.records}
    for entry in history.meant:
        if not any(name.startswith(entry.commit) for name in hashes):
            yield f"warning: no record of commit {entry.commit}, which was meant: {entry.reason}"


def _hints(folder: Path, failing: Sequence[Assessment]) -> list[str]:
    """At most one text, which shows the line of meant.yaml that marks the first regression as intended."""
    regressions = (
        (step.first_after.commit.short, a.series.metric) for a in failing for step in a.regressions
    )
    return [
        f"if the change was meant, add to meant: in {folder / 'meant.yaml'}:\n"
        f"  - {{commit: '{commit}', metric: {metric.name}, reason: ...}}"
        for commit, metric in islice(regressions, 1)
    ]


def _summary(assessments: Sequence[Assessment]) -> str:
    standing, missed, steps, meant = counts(assessments).values()
    series = f"{len(assessments)} series, {_count(steps, 'step')}, {meant} of them meant"
    if not standing and not missed:
        return f"no regression: {series}"
    return f"REGRESSION: {_count(standing, 'regression')}, {_count(missed, 'missed target')}; {series}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# -- what changed, by strategy ---------------------------------------------------------------------------


def changes_table(assessments: Sequence[Assessment]) -> Iterator[Table]:
    """A table with a line for each metric, strategy and target that cells miss, then a line for each verdict,
    metric, strategy and range of commits with steps, with the smallest and the largest change as texts; no
    table if there are no lines."""
    missed = [(each, target) for each in assessments for target in each.missed]
    by_target = grouped(
        missed,
        lambda m: (m[0].series.metric.name, strategy_of(m[0].series.cell), _target_text(m[1], m[0].series)),
    )
    ordered = sorted(assessments, key=lambda each: not each.regressions)
    by_step = grouped(((each, step) for each in ordered for step in reversed(each.steps)), _about)
    lines: list[dict[str, Any]] = []
    for (metric, strategy, text), of_target in by_target.items():
        about = {"verdict": "missed target", "metric": metric, "strategy": strategy, "change": text}
        lines.append({**about, "pairs": of_target})
    for (verdict, metric, strategy, commits), pairs in by_step.items():
        rising = sorted(pairs, key=lambda pair: -abs(pair[1].change))[::-1]
        texts = [each.series.difference(step.before, step.after) for each, step in (rising[0], rising[-1])]
        about = {"verdict": verdict, "metric": metric, "strategy": strategy, "commits": commits}
        change, last = " to ".join(dict.fromkeys(texts)), rising[-1][1]
        lines.append({**about, "change": change, "pairs": pairs, "step": last, "also": _also_changed(last)})
    if lines:
        yield TABLES.table("what changed", "What changed, by strategy", lines)


def _about(pair: tuple[Assessment, Step]) -> tuple[str, str, str, str]:
    """The verdict, metric, strategy and commit range of a step, by which steps are grouped into lines."""
    (assessment, step), series = pair, pair[0].series
    stands = step.meant or step.verdict != "regression" or step in assessment.regressions
    verdict = _verdict(step) + ("" if stands else " (undone)")
    return verdict, series.metric.name, strategy_of(series.cell), step.commit_range


def strategy_of(key: str) -> str:
    """The strategy in a cell's key; the whole key if a benchmark of another program has that key."""
    parts = key.split("/")
    return parts[1] if len(parts) >= _PARTS_OF_A_KEY else key


def _verdict(step: Step) -> str:
    return f"{step.verdict}{' (meant)' if step.meant else ''}"


def _also_changed(step: Step) -> str:
    return ", ".join(f"{name} {before} to {after}" for name, (before, after) in step.also_changed.items())


def _target_text(target: Target, series: Series) -> str:
    """A target as text, such as "at most 12", with ": MISSED" if the series misses the target."""
    limit = "at most" if series.metric.better == "smaller" else "at least"
    missed = ": MISSED" if target.is_missed(series) else ""
    return f"{limit} {series.spelled(target.value)}{missed}"


def _targets_text(assessment: Assessment) -> str:
    return "; ".join(_target_text(target, assessment.series) for target in assessment.targets)


# -- a series commit by commit, many series at a glance, and their steps ---------------------------------


def _series_tables(assessments: Sequence[Assessment]) -> list[Table]:
    if len(assessments) <= _IN_FULL:
        return [_over_commits(assessment) for assessment in assessments]
    shown = [a for a in _worst_first(assessments) if a.steps or a.targets or len(assessments) <= _AT_A_GLANCE]
    quiet = len(assessments) - len(shown)
    title = f"Series{f' with steps or targets ({quiet} others have none)' if quiet else ''}"
    return [TABLES.table("series at a glance", title, shown, targets=_targets_text)] if shown else []


def _worst_first(assessments: Sequence[Assessment]) -> list[Assessment]:
    return sorted(assessments, key=lambda a: (not a.fails, not a.steps))


def series_ends(assessment: Assessment) -> dict[str, Any]:
    """A table line on a series: its metric, first and last value, number of commits and steps, targets."""
    return TABLES.record("series", assessment, targets=_targets_text)


def _over_commits(assessment: Assessment) -> Table:
    series = assessment.series
    lines = [
        {
            "point": point,
            "before": before,
            "remarks": "; ".join(_remark(step) for step in assessment.steps if step.first_after is point),
        }
        for before, point in pairwise([None, *series.points])
    ]
    machine = f", {series.machine}" if series.machine else ""
    unit = f" ({series.unit})" if series.unit else ""
    targets = f"; {_targets_text(assessment)}" if assessment.targets else ""
    title = f"{series.metric.name}{unit} of {series.cell}, {series.suite}{machine}{targets}"
    return TABLES.table("points", title, lines, series=series)


def _remark(step: Step) -> str:
    kind = f"{step.verdict}, a drift" if step.drift else step.verdict
    return f"{kind}: {step.commit_range}" + (f" (meant: {step.meant})" if step.meant else "")


def _steps_table(assessments: Sequence[Assessment]) -> Iterator[Table]:
    lines = [
        {"series": a.series, "step": step} for a in _worst_first(assessments) for step in reversed(a.steps)
    ]
    if lines:
        title = "Steps, of each series the newest first"
        yield TABLES.table("steps", title, lines, verdict=_verdict, also_changed=_also_changed)


# -- for programs ----------------------------------------------------------------------------------------


def _point_records(assessment: Assessment) -> Iterator[dict[str, Any]]:
    """A record for each point of a series; a point that begins a step also has the step's verdict."""
    series, by_commit = assessment.series, {step.first_after.commit: step for step in assessment.steps}
    for point in series.points:
        step = by_commit.get(point.commit)
        yield TABLES.record("point of a series", point, series=series, step=step)


def _content(assessment: Assessment) -> dict[str, Any]:
    """A series with its points, steps and targets, as JSON content."""
    missed = assessment.missed
    targets = [{"value": target.value, "missed": target in missed} for target in assessment.targets]
    return TABLES.record("content", assessment, targets=targets, is_finite=math.isfinite)
