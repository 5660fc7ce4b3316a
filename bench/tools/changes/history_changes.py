"""What changed in a history, by metric and strategy: a line for the cells that one commit changed alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spbench.bench.command_line.output import Table

if TYPE_CHECKING:
    from spbench.bench.tools.changes.expectations import Target
    from spbench.bench.tools.changes.history import Assessment
    from spbench.bench.tools.changes.series import Series
    from spbench.bench.tools.changes.steps import Step

#: the keys of cells have at least so many parts, of which the second is the strategy
_PARTS_OF_A_KEY = 6


def changes_table(assessments: Sequence[Assessment]) -> Iterator[Table]:
    """A line for the steps of a metric that came with the same commits in the cells of a strategy, and one
    for the cells of a strategy that miss a target; no table if there is neither."""
    lines = [*_missed(assessments), *_steps(assessments)]
    if lines:
        important = ("", "metric", "strategy", "cells", "change", "commits")
        yield Table("What changed, by strategy", lines, important, ("strategy", "meant", "also changed"))


def _missed(assessments: Sequence[Assessment]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[Assessment]] = {}
    for each in assessments:
        for target in each.missed:
            named = (each.series.metric.name, strategy_of(each.series.cell), target_text(each.series, target))
            groups.setdefault(named, []).append(each)
    for (metric, strategy, text), alike in groups.items():
        yield _line("missed target", metric, strategy, alike, change=text)


def _steps(assessments: Sequence[Assessment]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[tuple[Assessment, Step]]] = {}
    for each in sorted(assessments, key=lambda each: not each.regressions):
        for step in reversed(each.steps):
            verdict: str = step.verdict
            if step.meant:
                verdict += " (meant)"
            elif step.verdict == "regression" and step not in each.regressions:
                verdict += " (undone)"
            name = (verdict, each.series.metric.name, strategy_of(each.series.cell), step.commit_range)
            groups.setdefault(name, []).append((each, step))
    for (verdict, metric, strategy, commits), alike in groups.items():
        worst_first = sorted(alike, key=lambda pair: -abs(pair[1].change))
        shown = [difference(of.series, step.before, step.after) for of, step in worst_first]
        first = worst_first[0][1]
        others = [f"{name} {a} to {b}" for name, (a, b) in first.also_changed.items()]
        yield _line(
            verdict,
            metric,
            strategy,
            [of for of, _ in alike],
            change=shown[0] if len({*shown}) == 1 else f"{shown[-1]} to {shown[0]}",
            commits=commits,
            meant=first.meant,
            **{"also changed": ", ".join(others)},
        )


def _line(
    verdict: str, metric: str, strategy: str, alike: Sequence[Assessment], **further: str
) -> dict[str, Any]:
    cells = {each.series.cell for each in alike}
    blank = dict.fromkeys(("change", "commits", "meant", "also changed"))
    return {"": verdict, "metric": metric, "strategy": strategy, "cells": len(cells), **blank, **further}


def strategy_of(key: str) -> str:
    """The strategy that a cell's key names; the key itself of what is no cell of ours, as a benchmark."""
    parts = key.split("/")
    return parts[1] if len(parts) >= _PARTS_OF_A_KEY else key


def target_text(series: Series, target: Target) -> str:
    """A target, and whether it is missed."""
    limit = "at most" if series.metric.better == "smaller" else "at least"
    missed = ": MISSED" if target.is_missed(series) else ""
    return f"{limit} {series.spelled(target.value)}{missed}"


def difference(series: Series, before: float, after: float) -> str:
    """A change as people read it: in percent; in units where that would be next to nothing; both statuses."""
    if before == after:
        return ""
    if series.metric.name == "status":
        return f"{series.spelled(before)} to {series.spelled(after)}"
    change = (after - before) / abs(before) if before else math.inf
    if 1e-4 <= abs(change) < math.inf:
        return f"{change:+.2%}"
    return f"{after - before:+.6g} {series.unit}".strip()
