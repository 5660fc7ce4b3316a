"""Steps of many series in few lines: those of a strategy's cells that came with the same commits are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spbench.bench.commands.output import Table

if TYPE_CHECKING:
    from spbench.bench.history.history import Assessment
    from spbench.bench.history.series import Series
    from spbench.bench.history.steps import Step

#: parts of a cell's key, of which the second is the strategy; keys of others have fewer
_PARTS_OF_A_KEY = 7


def steps_by_strategy(assessments: Sequence[Assessment]) -> list[Table]:
    """A table of the steps, regressions that stand first, then the newest, and one of the targets; neither
    where there are none."""
    groups: dict[tuple[object, ...], list[tuple[Assessment, Step]]] = {}
    for assessment in assessments:
        for step in assessment.steps:
            series = assessment.series
            same = (step.verdict, step.meant, step.drift, step.commit_range, _strategy(series.cell))
            groups.setdefault((*same, series.metric.name, series.machine), []).append((assessment, step))
    found = sorted(groups.values(), key=_newest, reverse=True)
    lines = [_line(members) for members in sorted(found, key=lambda members: not _stands(members))]
    important = ("", "strategy", "cells", "metric", "before -> after", "commits")
    below = ("meant", "also changed", "where")
    tables = [Table("Steps by strategy and metric", lines, important=important, below=below)] if lines else []
    targets = [line for assessment in assessments for line in _targets(assessment)]
    return [*tables, *([Table("Targets", targets)] if targets else [])]


def _newest(members: Sequence[tuple[Assessment, Step]]) -> str:
    return members[0][1].first_after.commit.date


def _stands(members: Sequence[tuple[Assessment, Step]]) -> bool:
    return any(step in assessment.regressions for assessment, step in members)


def _strategy(cell: str) -> str:
    """The strategy in a cell's key; "" where the key is a benchmark's."""
    parts = cell.split("/")
    return parts[1] if len(parts) >= _PARTS_OF_A_KEY and "::" not in cell else ""


def _line(members: Sequence[tuple[Assessment, Step]]) -> dict[str, Any]:
    from spbench.bench.regressions.grouped import shown_pair

    assessment, step = max(members, key=lambda member: _excess(*member))
    series, more = assessment.series, len(members) - 1
    return {
        "": f"{step.verdict}{' (meant)' if step.meant else ''}{', a drift' if step.drift else ''}",
        "strategy": _strategy(series.cell),
        "cells": len(members),
        "metric": series.metric.words,
        "before -> after": shown_pair(_value(series, step.before), _value(series, step.after), series.unit),
        "commits": step.commit_range,
        "machine": series.machine,
        "meant": step.meant,
        "also changed": ", ".join(f"{name} {a} to {b}" for name, (a, b) in step.also_changed.items()),
        "where": f"{series.cell}{f' and {more} more' if more else ''}",
    }


def _excess(assessment: Assessment, step: Step) -> float:
    """By how much a step is worse, for the worst of a group."""
    return assessment.series.metric.excess(step.before, step.after)


def _value(series: Series, value: float) -> float | str:
    """A number; of a status its name."""
    return series.spelled(value) if series.metric.name == "status" else value


def _targets(assessment: Assessment) -> Iterator[dict[str, Any]]:
    series = assessment.series
    for target in assessment.targets:
        yield {
            "": "MISSED" if target in assessment.missed else "met",
            "metric": series.metric.name,
            "target": f"{'at most' if series.metric.better == 'smaller' else 'at least'} {target.value:.6g}",
            "now": series.spelled(series.current),
            "unit": series.unit,
            "cell": series.cell,
        }
