"""Comparison: what was published beside what we find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from spbench.bench.atomic_write import write_whole
from spbench.bench.cell import Cell
from spbench.bench.config.scenario import Scenario
from spbench.bench.published.answer import answer_kinds
from spbench.bench.published.compared import Comparison, ScenarioResults
from spbench.bench.sweep.results import COMPARISON_FILE, Row

if TYPE_CHECKING:
    from pandas import DataFrame


def number_or_status(number: float | None, status: str) -> str | None:
    """A number for people, or why there is none; both, where a run that failed has a number."""
    if number is None:
        return status or None
    text = f"{number:.6g}"
    return text if status in ("", "ok") else f"{status} ({text})"


def compare(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """Everything that a scenario answers to beside ours, in each variant, cluster and engine among ``cells``.

    Args:
        cells: the declared cells (on other clusters and engines, if those were asked for).
        rows: the results by key; an answer whose cells are not there, or have no such number, stays.

    Raises:
        UserError: a published file cannot be read.
    """
    results = ScenarioResults(cells, rows, scenario.path.parent, scenario.document.inferred_from)
    return [
        entry
        for kind in answer_kinds().values()
        for entry in kind.compare_all(scenario.answers(kind), results)
    ]


def as_frame(comparisons: Sequence[Comparison]) -> DataFrame:
    """The comparison as a table; missing numbers are NaN."""
    from pandas import DataFrame

    columns = [field.name for field in fields(Comparison)]
    frame = DataFrame([asdict(c) for c in comparisons], columns=columns)
    numbers = ["published", "reproduced", "relative_error"]
    return frame.astype(dict.fromkeys(numbers, float))


def write(comparisons: Sequence[Comparison], folder: Path) -> Path:
    """Write comparison.csv and return its path.

    Raises:
        UserError: it cannot be written; an earlier one is as it was.
    """
    return write_csv(as_frame(comparisons), folder / COMPARISON_FILE)


def write_csv(table: DataFrame, path: Path) -> Path:
    """Write a table as a CSV file, without its index, whole or not at all; returns the path.

    Raises:
        UserError: it cannot be written; an earlier one is unchanged.
    """
    return write_whole(path, table.to_csv(index=False, lineterminator="\n"))
