"""The metrics of a cell that gates, histories and dashboards hold against earlier ones.

A metric is exact where any machine gives the same value for the same code (bytes sent; memory, simulated
times and answers of engines whose numbers are exact), else measured: its value differs from run to run, and
samples tell by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from spbench.bench.cell import Cell
from spbench.bench.engines.engine import engines
from spbench.bench.sweep.results import Row

#: relative, of simulated times, whose last digits differ between machines
SIMULATED_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Metric:
    """A quantity of cells.

    Attributes:
        name: with its unit, as in the columns of tables.
        unit: "bytes", "s", ...; empty: the searched quantity of the cell.
        better: which values are.
        tolerance: relative; an exact value that differs by no more is the same.
        judged: False for one that says the same as another metric.
    """

    name: str
    unit: str
    better: Literal["smaller", "bigger"]
    tolerance: float = 0.0
    judged: bool = True

    def excess(self, base: float, new: float) -> float:
        """How much worse the new value is, as a part of the base: negative if it is better, infinite beside a
        base of zero."""
        worse = base - new if self.better == "bigger" else new - base
        return worse / abs(base) if base else math.copysign(math.inf, worse) if worse else 0.0


#: in the order in which they are listed
METRICS = (
    Metric("sent_bytes", "bytes", "smaller"),
    Metric("formula_differences", "count", "smaller"),
    Metric("answer", "", "bigger"),
    Metric("peak_memory_bytes", "bytes", "smaller"),
    Metric("reserved_memory_bytes", "bytes", "smaller"),
    Metric("step_time_s", "s", "smaller", tolerance=SIMULATED_TOLERANCE),
    Metric("tokens_per_s", "tokens/s", "bigger", tolerance=SIMULATED_TOLERANCE, judged=False),
)


@dataclass(frozen=True)
class Reading:
    """The value of a metric in a cell.

    Attributes:
        unit: the metric's, or the searched quantity.
        exact: whether any machine would read the same.
        samples: of a measured value, of which it is the median, in the order in which they were taken; empty
            if there is one value alone.
    """

    metric: Metric
    value: float
    unit: str
    exact: bool
    samples: tuple[float, ...] = ()


def readings(row: Row) -> dict[str, Reading]:
    """What was read of a cell, by the names of metrics, in the order of :data:`METRICS`; metrics without a
    value are left out."""
    cell, measured = row["cell"], row["measurement"]
    exact = is_exact(row)
    searched = (cell.get("search") or {}).get("quantity", "")
    counted = _counted(row)
    found = {}
    for metric in METRICS:
        value = counted.get(metric.name, measured.get(metric.name))
        if value is not None:
            samples = measured.get("step_time_samples_s") if metric.name == "step_time_s" else None
            found[metric.name] = Reading(
                metric,
                value,
                metric.unit or searched,
                exact or metric.name in counted,
                () if exact else tuple(samples or ()),
            )
    return found


def is_exact(row: Row) -> bool:
    """Whether the engine of a cell gives the same numbers on any machine."""
    engine = engines().get(row["cell"].get("engine", Cell.model_fields["engine"].default))
    return engine is not None and engine.is_exact


def _counted(row: Row) -> dict[str, float | None]:
    """What is counted from messages, and so exact on every engine."""
    measured = row["measurement"]
    sent = measured.get("communication")
    return {
        # exactly rounded, so that the order of the entries does not matter
        "sent_bytes": math.fsum(entry["sent_bytes"] for entry in sent) if sent is not None else None,
        "formula_differences": len(measured.get("formula_difference") or []),
    }
