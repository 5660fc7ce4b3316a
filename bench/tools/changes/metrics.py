"""The metrics of a cell that gates, histories and dashboards compare with earlier ones.

A metric is exact where any machine gives the same value for the same code (bytes sent; memory, simulated
times and answers of engines whose numbers are exact), else measured: its value differs from run to run, and
from step to step within a run. A row of several rounds (:func:`merged_rounds`) has the samples of as many
processes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

from spbench.bench.cell import Cell
from spbench.bench.measure import engine_classes
from spbench.bench.measurement import Status
from spbench.bench.row import Row
from spbench.plots.series import grouped

#: the better, the earlier
STATUSES: tuple[Status, ...] = ("ok", "oom", "unsupported", "numerics", "mismatch", "timeout", "failed")
assert set(STATUSES) == set(get_args(Status))

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

    @property
    def words(self) -> str:
        """The name for people, beside values with their units."""
        return self.name.removesuffix(f"_{self.unit}").replace("_", " ")

    def excess(self, base: float, new: float) -> float:
        """How much worse the new value is, as a share of the base: negative if it is better, infinite if the
        base is zero."""
        worse = base - new if self.better == "bigger" else new - base
        return worse / abs(base) if base else math.copysign(math.inf, worse) if worse else 0.0


#: in the order in which they are listed
METRICS = (
    Metric("sent_bytes", "bytes", "smaller"),
    Metric("formula_differences", "count", "smaller"),
    Metric("answer", "", "bigger"),
    Metric("peak_memory_bytes", "bytes", "smaller"),
    Metric("reserved_memory_bytes", "bytes", "smaller"),
    Metric("peak_host_memory_bytes", "bytes", "smaller"),
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

    @property
    def is_finite(self) -> bool:
        """Whether the value and all samples are finite numbers."""
        return all(map(math.isfinite, (self.value, *self.samples)))


Verdict = Literal["worse", "missing", "better", "new"]
#: the worst first
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


def verdict_of_change(change: float) -> Verdict:
    """The verdict on a change, which is positive where the new value is worse."""
    return "worse" if change > 0 else "better"


@dataclass(frozen=True)
class Difference:
    """One number, status, cell or claim that is not what it was.

    Attributes:
        where: a cell's key, or a claim and its cells.
        base, new: the value before and now; None if there is none.
        change: how much worse it is, as a part of the base (negative: better); infinite if not a number.
        allowed: whether it is worse only in what a subset need not have.
        interval: of ``change``, for a measured number that was tested.
        p: p-value of the test, corrected for the number of tests.
        strategy: of the cell, or of the cell that a claim is about; "" where that is not known.
        moved, why: see :class:`Why`.
    """

    verdict: Verdict
    where: str
    quantity: str
    base: Any
    new: Any
    change: float = math.inf
    allowed: bool = False
    interval: tuple[float, float] | None = None
    p: float | None = None
    strategy: str = ""
    moved: tuple[str, ...] = ()
    why: str = ""

    @property
    def fails(self) -> bool:
        """Whether the difference closes the gate."""
        return self.verdict in ("worse", "missing") and not self.allowed


def readings(row: Row) -> dict[str, Reading]:
    """The metrics of a row that have a value, by name, in the order of :data:`METRICS`."""
    cell, measured = row["cell"], row["measurement"]
    exact = has_exact_engine(row)
    searched = (cell.get("search") or {}).get("quantity", "")
    counted = _counted(row)
    read = {}
    for metric in METRICS:
        value = counted.get(metric.name, measured.get(metric.name))
        if value is not None:
            is_exact = exact or metric.name in counted
            rounds = () if is_exact else _rounds(metric, row)
            read[metric.name] = Reading(metric, value, metric.unit or searched, is_exact, rounds)
    return read


def has_exact_engine(row: Row) -> bool:
    """Whether the engine of a cell gives the same numbers on any machine."""
    engine = engine_classes().get(row["cell"].get("engine", Cell.model_fields["engine"].default))
    return engine is not None and engine.is_exact


def _rounds(metric: Metric, row: Row) -> tuple[tuple[float, ...], ...]:
    """The samples of each round in which a metric was measured; without rounds, the samples of the run, if
    any."""
    rounds = []
    for measured in row.get("rounds") or [row["measurement"]]:
        samples = measured.get(metric.samples) or ()
        if not samples and "rounds" in row and measured.get(metric.name) is not None:
            samples = (measured[metric.name],)
        if samples:
            rounds.append(tuple(samples))
    return tuple(rounds)


def _counted(row: Row) -> dict[str, float | None]:
    """What is counted from messages, and so exact on every engine."""
    measured = row["measurement"]
    sent = measured.get("communication")
    return {
        # exactly rounded, so that the order of the entries does not matter
        "sent_bytes": math.fsum(entry["sent_bytes"] for entry in sent) if sent is not None else None,
        "formula_differences": len(measured.get("formula_difference") or []) if sent is not None else None,
    }


def merged_rounds(rounds: Sequence[Iterable[Row]]) -> list[Row]:
    """One row for each cell, from those of its rounds: the same cells measured again by other processes.

    The row is that of the first round with the worst status. Its entry ``rounds`` has, for every round with
    measured metrics, these with their samples and the ``time``; in ``measurement`` stand their medians over
    rounds. Rows whose metrics are all exact are as they were.

    Args:
        rounds: the rows of each, in the order in which they were run.
    """
    return [_merged(rows) for rows in grouped(chain.from_iterable(rounds), lambda row: row["key"]).values()]


def _merged(rows: Sequence[Row]) -> Row:
    chosen = max(rows, key=lambda row: STATUSES.index(row["status"]))
    by_round = [measured for row in rows if (measured := _measured(row))]
    if not by_round:
        return chosen
    medians = {
        metric.name: statistics.median(values)
        for metric in METRICS
        if (values := [measured[metric.name] for measured in by_round if metric.name in measured])
    }
    return Row(**{**chosen, "measurement": {**chosen["measurement"], **medians}, "rounds": by_round})


def _measured(row: Row) -> dict[str, Any]:
    """The measured metrics of a row with their samples, and when they were measured; empty: it has none."""
    measured: dict[str, Any] = {}
    for name, reading in readings(row).items():
        if not reading.exact:
            measured[name] = reading.value
            if reading.samples:
                measured[reading.metric.samples] = list(reading.samples)
    return {"time": row.get("time", ""), **measured} if measured else {}
