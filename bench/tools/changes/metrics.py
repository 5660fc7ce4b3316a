"""The metrics of a cell whose values gates, histories and dashboards compare with earlier values.

A metric is exact where any machine gives the same value for the same code (bytes sent; memory, simulated
times and answers of engines whose numbers are exact). Otherwise the metric is measured: its value differs
from run to run, and from step to step within a run. A row of several rounds (:func:`merged_rounds`) has the
samples of as many processes.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from spbench.bench.cell import Cell
from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.measure import engine_classes
from spbench.bench.measurement import Status
from spbench.bench.row import Row
from spbench.plots.series import grouped

#: the records and tables of histories, of the gate, and of its reasons
TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))

#: the statuses of cells from best to worst
STATUSES: tuple[Status, ...] = ("ok", "oom", "unsupported", "numerics", "mismatch", "timeout", "failed")
assert set(STATUSES) == set(get_args(Status))


@dataclass(frozen=True)
class Metric:
    """A quantity of cells that is compared with earlier values.

    Attributes:
        name: the name with its unit, such as "step_time_s", as in the columns of tables.
        unit: "bytes", "s", ...; empty: the searched quantity of the cell.
        better: whether smaller or bigger values are better.
        tolerance: relative; exact values that differ by no more count as equal.
        judged: False for a metric that repeats another metric.
        samples: the key of the metric's samples in a measurement; empty: the metric has no samples.
    """

    name: str
    unit: str
    better: Literal["smaller", "bigger"]
    tolerance: float = 0.0
    judged: bool = True
    samples: str = ""

    @property
    def words(self) -> str:
        """The name without its unit and underscores, for text that shows units with values."""
        return self.name.removesuffix(f"_{self.unit}").replace("_", " ")

    def excess(self, base: float, new: float) -> float:
        """How much worse the new value is, as a share of the base: negative if it is better, infinite if the
        base is zero."""
        worse = base - new if self.better == "bigger" else new - base
        return worse / abs(base) if base else math.copysign(math.inf, worse) if worse else 0.0


#: all metrics, in the order in which outputs list them
METRICS = tuple(Metric(name, **of) for name, of in TABLES.forms["metrics"].items())


@dataclass(frozen=True)
class Reading:
    """The value of a metric in a cell.

    Attributes:
        unit: the metric's unit, or the searched quantity.
        exact: whether any machine would give the same value.
        rounds: the samples of a measured value, a tuple for each process that took samples, in the order in
            which they were taken; empty if only one value was recorded, or if it is exact.
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
#: all verdicts, the worst first
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


def verdict_of_change(change: float) -> Verdict:
    """The verdict on a change: "worse" if ``change`` is positive, else "better"."""
    return "worse" if change > 0 else "better"


@dataclass(frozen=True)
class Difference:
    """A number, status, cell or claim that differs between the base and the new results.

    Attributes:
        where: a cell's key, or a claim's name and variant.
        quantity: the metric's name, "status", "cell", "error" (of a claim), ...
        base, new: the value in the base and in the new results; None if there is no value.
        change: how much worse the new value is, as a share of the base (negative: better); infinite where no
            share can be computed. For "error", the difference of the two errors.
        allowed: whether the difference does not fail, because a subset may lack this cell or claim.
        interval: the 99% interval of ``change``, for a measured number that was tested.
        p: the p-value of the test, corrected for the number of tests.
        strategy: the strategy of the cell, or of the claim's cell; "" if not known.
        moved, why: ``moved`` and ``text`` of :class:`Why`.
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
        """Whether the difference makes the gate fail."""
        return self.verdict in ("worse", "missing") and not self.allowed


def readings(row: Row) -> dict[str, Reading]:
    """The readings of a row's metrics that have a value, by metric name, in the order of :data:`METRICS`."""
    cell, measured = row["cell"], row["measurement"]
    exact = has_exact_engine(row)
    searched = (cell.get("search") or {}).get("quantity", "")
    counts = _message_metrics(row)
    read = {}
    for metric in METRICS:
        value = counts.get(metric.name, measured.get(metric.name))
        if value is not None:
            is_exact = exact or metric.name in counts
            rounds = () if is_exact else _rounds(metric, row)
            read[metric.name] = Reading(metric, value, metric.unit or searched, is_exact, rounds)
    return read


def has_exact_engine(row: Row) -> bool:
    """Whether the engine of the row's cell gives the same numbers on any machine."""
    engine = engine_classes().get(row["cell"].get("engine", Cell.model_fields["engine"].default))
    return engine is not None and engine.is_exact


def _rounds(metric: Metric, row: Row) -> tuple[tuple[float, ...], ...]:
    """The samples of each round in which the metric was measured; without rounds, those of the one run."""
    rounds = []
    for measured in row.get("rounds") or [row["measurement"]]:
        samples = measured.get(metric.samples) or ()
        if not samples and "rounds" in row and measured.get(metric.name) is not None:
            samples = (measured[metric.name],)
        if samples:
            rounds.append(tuple(samples))
    return tuple(rounds)


def _message_metrics(row: Row) -> dict[str, float | None]:
    """The metrics that are counted from messages, so that their values are exact on every engine."""
    measured = row["measurement"]
    sent = measured.get("communication")
    return {
        # fsum rounds once, so that the order of the entries does not matter
        "sent_bytes": math.fsum(entry["sent_bytes"] for entry in sent) if sent is not None else None,
        "formula_differences": len(measured.get("formula_difference") or []) if sent is not None else None,
    }


def merged_rounds(rounds: Sequence[Iterable[Row]]) -> list[Row]:
    """One row for each cell, merged from the cell's rows in all rounds; each round is another process.

    The merged row is the row of the first round with the worst status. Its entry ``rounds`` has, for every
    round with measured metrics, the metrics with their samples and the ``time``; its ``measurement`` has the
    metrics' medians over rounds. Rows whose metrics are all exact stay as they are.

    Args:
        rounds: the rows of each round, in the order in which the rounds were run.
    """
    return [_merge(rows) for rows in grouped(chain.from_iterable(rounds), lambda row: row["key"]).values()]


def _merge(rows: Sequence[Row]) -> Row:
    chosen = max(rows, key=lambda row: STATUSES.index(row["status"]))
    by_round = [measured for row in rows if (measured := _measured_metrics(row))]
    if not by_round:
        return chosen
    medians = {
        metric.name: statistics.median(values)
        for metric in METRICS
        if (values := [measured[metric.name] for measured in by_round if metric.name in measured])
    }
    return Row(**{**chosen, "measurement": {**chosen["measurement"], **medians}, "rounds": by_round})


def _measured_metrics(row: Row) -> dict[str, Any]:
    """The measured metrics of a row with their samples, and the row's ``time``; empty if it has none."""
    measured: dict[str, Any] = {}
    for name, reading in readings(row).items():
        if not reading.exact:
            measured[name] = reading.value
            if reading.samples:
                measured[reading.metric.samples] = list(reading.samples)
    return {"time": row.get("time", ""), **measured} if measured else {}
