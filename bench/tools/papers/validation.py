"""The tables of README.md: our errors by who measured real machines, beside other predictors'; and each rung
of ALST's ladder, the longest sequence as published and as simulated, and what its switch costs in time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median

from spbench.bench.tools.papers.paper_findings import ROLES, Line, Record, distinct, label_of, table_of
from spbench.bench.tools.papers.sources import MeasuredSource, measured_sources, published_file

PREDICTORS_FILE = "other_predictors.csv"
_LADDER = "alst"
#: names of ratios, as the scenario gives them: the machine and the rungs as the table has them, and the step
_PRICE = re.compile(r"(?P<machine>.+), (?P<rung>[^,]+) over (?P<base>[^,]+), (?P<step>[^,]+)")

#: what readers are told of the quantities of scenarios
QUANTITY_NAMES = {
    "peak_memory_gib": "peak memory",
    "allocated_memory_gib": "memory after a step",
    "reserved_memory_gib": "reserved memory",
    "step_time_ms": "step time",
}


def records_by_source(records: Sequence[Record]) -> dict[MeasuredSource, list[Record]]:
    """The records of each file of measurements that has any; each measured number once."""
    numbers = distinct(records)
    by_source = {
        source: [r for r in numbers if r["source"].startswith(f"{source.file}:")]
        for source in measured_sources()
    }
    return {source: some for source, some in by_source.items() if some}


def validation_lines(records: Sequence[Record]) -> list[Line]:
    """A line for each source of measurements and quantity, each followed by those of other predictors of the
    same runs; then predictors on other runs. ``records`` are of `spbench reproduce measured`."""
    others = published_file(PREDICTORS_FILE).rows
    lines = []
    for source, some in records_by_source(records).items():
        for quantity, name in QUANTITY_NAMES.items():
            if mine := [record for record in some if record["quantity"] == quantity]:
                lines.append(_our_line(source, name, mine))
                beside = [
                    other for other in others if (other["file"], other["quantity"]) == (source.file, name)
                ]
                lines += map(_other_line, beside)
    return lines + [_other_line(other) for other in others if not other["file"]]


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


def _other_line(other: Mapping[str, str]) -> Line:
    """The line of another predictor: its errors on runs that are here, else what its authors state."""
    stated = {"numbers": "", "median error": "", "mean": other["mean"], "worst": other["worst"]}
    return {
        "predicted by": other["predictor"],
        "measured by, on": other["compared"],
        "quantity": other["quantity"],
        **(_statistics(predictor_errors(other)) if other["file"] else stated),
        "role, or source": other["source"],
    }


def predictor_errors(other: Mapping[str, str]) -> list[float]:
    """|predicted / measured - 1| of a row of results/measured/other_predictors.csv: by the columns that it
    names of the file of measurements that it names."""
    rows = published_file(other["file"]).rows
    return [abs(float(row[other["predicted"]]) / float(row[other["measured"]]) - 1) for row in rows]


def _statistics(errors: Sequence[float]) -> Line:
    """How many there are, their median, mean and worst; "" without errors."""
    if not errors:
        return {"numbers": 0, "median error": "", "mean": "", "worst": ""}
    values = {"median error": median(errors), "mean": mean(errors), "worst": max(errors)}
    return {"numbers": len(errors), **{name: _percent(error) for name, error in values.items()}}


def _percent(error: float) -> str:
    """One digit after the point; two significant ones below 1%."""
    return f"{error:.1%}" if error >= 0.01 else f"{100 * error:.2g}%"


# -- the ladder ----------------------------------------------------------------------------------------------


def ladder_lines(records: Sequence[Record]) -> list[Line]:
    """A line for each rung, in the order of the published table; no price where no step was timed with and
    without a switch.

    Args:
        records: of `spbench reproduce field`.
    """
    prices: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if (price := _PRICE.fullmatch(table_of(record))) and record["reproduced"] is not None:
            of = prices[f"{price['machine']}, {price['rung']}"]
            of[price["base"]].append(f"{record['reproduced'] - 1:+.1%} ({price['step']})")
    lines = []
    for record in records:
        if table_of(record) == _LADDER:
            machine, _, rung = label_of(record).rpartition(", ")
            paid = prices[label_of(record)].items()
            lines.append(
                {
                    "on": machine.replace("gpus ", ""),
                    "switches": rung,
                    "longest, published": _length(record["published"]),
                    "ours": _length(record["reproduced"]),
                    "step": "; ".join(f"{', '.join(steps)} over {base}" for base, steps in paid),
                }
            )
    return lines


def _length(tokens: float | None) -> str:
    return "none" if tokens is None else f"{round(tokens):,}"
