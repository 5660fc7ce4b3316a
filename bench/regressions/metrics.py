"""The metrics of a cell that gates, histories and dashboards hold against earlier ones.

A metric is exact where any machine gives the same value for the same code (bytes sent; memory, simulated
times and answers of engines whose numbers are exact), else measured: its value differs from run to run, and
from step to step within a run. Samples show the one and, where a row is of several rounds
(:mod:`bench.regressions.rounds`), the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
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
        samples: the key of its samples in a measurement; empty: it has none.
    """

    name: str
    unit: str
    better: Literal["smaller", "bigger"]
    tolerance: float = 0.0
    judged: bool = True
    samples: str = ""

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
    Metric("step_time_s", "s", "smaller", tolerance=SIMULATED_TOLERANCE, samples="step_time_samples_s"),
    Metric("tokens_per_s", "tokens/s", "bigger", tolerance=SIMULATED_TOLERANCE, judged=False),
    # of the benchmarks of pytest-benchmark
    Metric("time_s", "s", "smaller", samples="time_samples_s"),
)


@dataclass(frozen=True)
class Reading:
    """The value of a metric in a cell.

    Attributes:
        unit: the metric's, or the searched quantity.
        exact: whether any machine would read the same.
        rounds: of a measured value, the samples of each process that took some, in the order in which they
            were taken; empty if there is one value alone.
    """

    metric: Metric
    value: float
    unit: str
    exact: bool
    rounds: tuple[tuple[float, ...], ...] = ()

    @property
    def samples(self) -> tuple[float, ...]:
        """The samples of all processes, in the order in which they were taken."""
        return tuple(chain.from_iterable(self.rounds))


def readings(row: Row) -> dict[str, Reading]:
    """What was read of a cell, by the names of metrics, in the order of :data:`METRICS`; metrics without a
    value are left out."""
    cell, measured = row["cell"], row["measurement"]
    exact = has_exact_engine(row)
    searched = (cell.get("search") or {}).get("quantity", "")
    counted = _counted(row)
    found = {}
    for metric in METRICS:
        value = counted.get(metric.name, measured.get(metric.name))
        if value is not None:
            is_exact = exact or metric.name in counted
            rounds = () if is_exact else _rounds(metric, row)
            found[metric.name] = Reading(metric, value, metric.unit or searched, is_exact, rounds)
    return found


def has_exact_engine(row: Row) -> bool:
    """Whether the engine of a cell gives the same numbers on any machine."""
    engine = engines().get(row["cell"].get("engine", Cell.model_fields["engine"].default))
    return engine is not None and engine.is_exact


def _rounds(metric: Metric, row: Row) -> tuple[tuple[float, ...], ...]:
    """The samples of each round in which a metric was measured; of a row of one run, its samples, if any."""
    found = []
    for measured in row.get("rounds") or [row["measurement"]]:
        samples = measured.get(metric.samples) or ()
        if not samples and "rounds" in row and measured.get(metric.name) is not None:
            samples = (measured[metric.name],)
        if samples:
            found.append(tuple(samples))
    return tuple(found)


def _counted(row: Row) -> dict[str, float | None]:
    """What is counted from messages, and so exact on every engine."""
    measured = row["measurement"]
    sent = measured.get("communication")
    return {
        # exactly rounded, so that the order of the entries does not matter
        "sent_bytes": math.fsum(entry["sent_bytes"] for entry in sent) if sent is not None else None,
        "formula_differences": len(measured.get("formula_difference") or []) if sent is not None else None,
    }
