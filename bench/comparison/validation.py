"""The table "validated against real machines": our errors by who measured, beside other predictors'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, median

from spbench.bench.comparison.findings import ROLES, Line, Record, distinct
from spbench.bench.comparison.measured_sources import (
    MeasuredSource,
    OtherPredictor,
    measured_sources,
    other_predictors,
)

#: columns of the table by the quantities of scenarios
COLUMNS = {
    "peak_memory_gib": "peak memory",
    "allocated_memory_gib": "memory after a step",
    "reserved_memory_gib": "reserved memory",
    "step_time_ms": "step time",
}


def records_by_source(records: Sequence[Record]) -> dict[MeasuredSource, list[Record]]:
    """The records of each file of measurements that has any; each measured number once."""
    files = [(source, f"{source.file}:") for source in measured_sources()]
    numbers = distinct(records)
    found = {source: [r for r in numbers if r["source"].startswith(file)] for source, file in files}
    return {source: some for source, some in found.items() if some}


def validation_lines(records: Sequence[Record]) -> list[Line]:
    """A line for each source of measurements, then those of other predictors of its rows, then those of
    predictors on other rows.

    Args:
        records: of `spbench reproduce measured`.
    """
    others = other_predictors()
    lines = []
    for source, some in records_by_source(records).items():
        lines.append(_our_line(source, some))
        lines += [_other_line(other) for other in others if other.file == source.file]
    return lines + [_other_line(other) for other in others if not other.file]


def _our_line(source: MeasuredSource, records: Sequence[Record]) -> Line:
    roles = Counter(record["role"] for record in records)
    errors: dict[str, list[float]] = {quantity: [] for quantity in COLUMNS}
    for record in records:
        if record["quantity"] in errors and record["relative_error"] is not None:
            errors[record["quantity"]].append(abs(record["relative_error"]))
    return {
        "predictor": "spbench",
        "measured by, on": f"{source.measured_by}, {source.machines}",
        "rows": len({record["source"].split(":")[1] for record in records}),
        **{column: _summary(errors[quantity]) for quantity, column in COLUMNS.items()},
        "roles of numbers, or source": ", ".join(f"{roles[role]} {role}" for role in ROLES if roles[role]),
    }


def _other_line(other: OtherPredictor) -> Line:
    texts: Mapping[str, str] = {
        "peak memory": _summary(other.memory) or other.memory_text,
        "step time": _summary(other.time) or other.time_text,
    }
    return {
        "predictor": other.name,
        "measured by, on": other.compared,
        "rows": len(other.memory) or "",
        **{column: texts.get(column, "") for column in COLUMNS.values()},
        "roles of numbers, or source": other.source,
    }


def _summary(errors: Sequence[float]) -> str:
    """As "median 0.1%, mean 0.2%, worst 1.4% (44)"; "" without errors."""
    if not errors:
        return ""
    found = {"median": median(errors), "mean": mean(errors), "worst": max(errors)}
    return ", ".join(f"{name} {_percent(error)}" for name, error in found.items()) + f" ({len(errors)})"


def _percent(error: float) -> str:
    """With two digits after the point below 1%, as errors of memory are there."""
    return f"{error:.2%}" if error < 0.01 else f"{error:.1%}"
