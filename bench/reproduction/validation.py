"""The table "validated against real machines": our errors by who measured, beside other predictors'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, median

from spbench.bench.reproduction.findings import ROLES, Line, Record, distinct
from spbench.bench.reproduction.measured_sources import (
    MeasuredSource,
    OtherPredictor,
    measured_sources,
    other_predictors,
)

#: what readers are told of the quantities of scenarios
QUANTITY_NAMES = {
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
    """A line for each source of measurements and quantity, each followed by those of other predictors of the
    same runs; then predictors on other runs.

    Args:
        records: of `spbench reproduce measured`.
    """
    others = other_predictors()
    lines = []
    for source, some in records_by_source(records).items():
        for quantity, name in QUANTITY_NAMES.items():
            mine = [record for record in some if record["quantity"] == quantity]
            if mine:
                lines.append(_our_line(source, name, mine))
                beside = [other for other in others if (other.file, other.quantity) == (source.file, name)]
                lines += map(_other_line, beside)
    return lines + [_other_line(other) for other in others if not other.file]


def _our_line(source: MeasuredSource, quantity: str, records: Sequence[Record]) -> Line:
    roles = Counter(record["role"] for record in records)
    errors = [abs(r["relative_error"]) for r in records if r["relative_error"] is not None]
    return {
        "predicted by": "spbench",
        "measured by, on": f"{source.measured_by}, {source.machines}",
        "quantity": quantity,
        **_statistics(errors),
        "role, or source": ", ".join(f"{roles[role]} {role}" for role in ROLES if roles[role]),
    }


def _other_line(other: OtherPredictor) -> Line:
    stated = {"numbers": "", "median error": "", "mean": other.mean, "worst": other.worst}
    return {
        "predicted by": other.name,
        "measured by, on": other.compared,
        "quantity": other.quantity,
        **(_statistics(other.errors) if other.errors else stated),
        "role, or source": other.source,
    }


def _statistics(errors: Sequence[float]) -> Line:
    """How many there are, their median, mean and worst; "" without errors."""
    if not errors:
        return {"numbers": 0, "median error": "", "mean": "", "worst": ""}
    found = {"median error": median(errors), "mean": mean(errors), "worst": max(errors)}
    return {"numbers": len(errors), **{name: _percent(error) for name, error in found.items()}}


def _percent(error: float) -> str:
    """One digit after the point; two significant ones below 1%."""
    return f"{error:.1%}" if error >= 0.01 else f"{100 * error:.2g}%"
