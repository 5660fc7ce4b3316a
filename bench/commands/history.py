"""`spbench history`: metrics over commits, and where they changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spbench.bench.commands.history_tables import as_content, as_records, sections
from spbench.bench.commands.options import printed
from spbench.bench.commands.output import Output

if TYPE_CHECKING:
    from spbench.bench.history.history import Assessment, History


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
def command(
    folder: Path,
    suite: str | None,
    metric: str | None,
    cell: str,
    machine: str | None,
    branch: str | None,
    fail_on_regression: bool,
) -> Output:
    """Show metrics over the commits recorded in FOLDER, and their steps.

    Three series or fewer are shown commit by commit, more as an overview. A step has the range of commits
    that holds its cause, for git log. FOLDER/targets.yaml has values that must be met, FOLDER/meant.yaml
    the steps that were meant.
    """
    from spbench.bench.history.history import read_history

    history = read_history(folder)
    branch = branch if branch is not None else history.branches[0]
    chosen = history.series(suite=suite, metric=metric, cell=cell, machine=machine, branch=branch)
    assessments = [history.assess(series) for series in chosen]
    failing = [assessment for assessment in assessments if assessment.fails]
    return Output(
        sections(assessments),
        {"branch": branch, "fails": bool(failing), **as_content(assessments)},
        as_records(assessments),
        notes=[*_asides(history, branch), *_hints(folder, failing), _summary(assessments)],
        code=int(fail_on_regression and bool(failing)),
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
    steps = [step for assessment in assessments for step in assessment.steps]
    standing = sum(len(assessment.regressions) for assessment in assessments)
    missed = sum(len(assessment.missed) for assessment in assessments)
    meant = sum(bool(step.meant) for step in steps)
    counts = f"{len(assessments)} series, {_count(len(steps), 'step')}, {meant} of them meant"
    if not standing and not missed:
        return f"no regression: {counts}"
    return f"REGRESSION: {_count(standing, 'regression')}, {_count(missed, 'missed target')}; {counts}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
