"""Rows of several rounds: the same cells measured again and again, each time by another process.

Samples of one process lie closer together than those of two, since processes differ in where memory lies and
in what else the machine does meanwhile. So a comparison of measured numbers needs rounds, and takes each as
one observation (:mod:`bench.regressions.measured_change`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from spbench.bench.regressions.metrics import METRICS, readings
from spbench.bench.regressions.statuses import worst_status
from spbench.bench.sweep.results import Row


def merged_rounds(rounds: Sequence[Iterable[Row]]) -> list[Row]:
    """One row for each cell, from those of its rounds.

    The row is that of the first round with the worst status. Its entry ``rounds`` has, for every round with
    measured metrics, these with their samples and the ``time``; in ``measurement`` stand their medians over
    rounds. Rows whose metrics are all exact are as they were.

    Args:
        rounds: the rows of each, in the order in which they were run.
    """
    by_key: dict[str, list[Row]] = {}
    for rows in rounds:
        for row in rows:
            by_key.setdefault(row["key"], []).append(row)
    return [_merged(rows) for rows in by_key.values()]


def _merged(rows: Sequence[Row]) -> Row:
    status = worst_status(row["status"] for row in rows)
    chosen = next(row for row in rows if row["status"] == status)
    by_round = [found for row in rows if (found := _measured(row))]
    if not by_round:
        return chosen
    names = dict.fromkeys(name for found in by_round for name in found)
    medians = {
        metric.name: statistics.median(found[metric.name] for found in by_round if metric.name in found)
        for metric in METRICS
        if metric.name in names
    }
    return {**chosen, "measurement": {**chosen["measurement"], **medians}, "rounds": by_round}


def _measured(row: Row) -> dict[str, Any]:
    """The measured metrics of a row with their samples, and when they were measured; empty: it has none."""
    found: dict[str, Any] = {}
    for name, reading in readings(row).items():
        if not reading.exact:
            found[name] = reading.value
            if reading.samples:
                found[reading.metric.samples] = list(reading.samples)
    return {"time": row.get("time", ""), **found} if found else {}
