"""Histories that are made up: records of two machines over commits, with noise."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from spbench.bench.tools.changes.from_results import add_record
from spbench.bench.tools.changes.metrics import METRICS, Reading
from spbench.bench.tools.changes.run_record import CellRecord, Commit, RunRecord

METRIC = {metric.name: metric for metric in METRICS}
MACHINE = {"host": "one", "cpu": "AMD EPYC", "cores": 2, "memory_bytes": 2**34, "gpus": [], "os": "Linux 6"}
OTHER = {**MACHINE, "host": "two", "cores": 8}


def commit(number: int, branch: str = "main") -> Commit:
    """The commit of a day."""
    name = hashlib.sha1(f"{branch} {number}".encode()).hexdigest()
    date = datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=number)
    return Commit(name, date.isoformat(timespec="seconds"), branch)


def cell(key: str, status: str = "ok", exact: bool = True, **values: float | Sequence[float]) -> CellRecord:
    """A cell with the values of metrics: exact ones, or the samples of measured ones."""
    recorded = {}
    for name, value in values.items():
        unit = METRIC[name].unit
        if isinstance(value, (int, float)):
            recorded[name] = Reading(METRIC[name], value, unit, True)
        else:
            samples = tuple(value)
            recorded[name] = Reading(METRIC[name], statistics.median(samples), unit, False, (samples,))
    return CellRecord(key, status, exact, recorded)  # type: ignore[arg-type]


def record(
    number: int, *cells: CellRecord, machine: Mapping[str, object] = MACHINE, branch: str = "main"
) -> RunRecord:
    """The record of a nightly run, an hour after its commit."""
    of = commit(number, branch)
    date = (datetime.fromisoformat(of.date) + timedelta(hours=1)).isoformat(timespec="seconds")
    versions = {"torch": "2.13.0", "spbench": "0.1.0"}
    return RunRecord("nightly", date, of, machine, versions, {found.key: found for found in cells})


def nightly(
    folder: Path,
    commits: int,
    cells: Callable[[int, random.Random], Sequence[CellRecord]],
    machines: Sequence[Mapping[str, object]] = (MACHINE,),
    seed: int = 0,
) -> Path:
    """Write a history: on each machine, what ``cells`` says of each commit."""
    generator = random.Random(seed)
    for number in range(commits):
        for machine in machines:
            add_record(record(number, *cells(number, generator), machine=machine), folder)
    return folder


def noisy(generator: random.Random, level: float, noise: float, samples: int = 9) -> list[float]:
    """Samples of one night: each with that relative noise, and all with a third of it in common."""
    night = level * generator.gauss(1, noise / 3)
    return [night * generator.gauss(1, noise) for _ in range(samples)]


def of_suite(found: RunRecord, suite: str) -> RunRecord:
    """The record under another name of the suite."""
    return replace(found, suite=suite)
