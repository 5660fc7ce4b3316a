"""Histories that are made up: records of two machines over commits, with noise."""

import hashlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from spbench.bench.row import Row
from spbench.bench.tools.changes.record_command import Commit, RunRecord, add_record
from tests.tools.changes.rows import raw

Cell = dict[str, Any]

MACHINE = {"host": "one", "cpu": "AMD EPYC", "cores": 2, "memory_bytes": 2**34, "gpus": [], "os": "Linux 6"}
VERSIONS = {"torch": "2.13.0", "spbench": "0.1.0"}
OTHER = {**MACHINE, "host": "two", "cores": 8}


def commit(number: int, branch: str = "main") -> Commit:
    """The commit of a day."""
    name = hashlib.sha1(f"{branch} {number}".encode()).hexdigest()
    date = datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=number)
    return Commit(name, date.isoformat(timespec="seconds"), branch)


def cell(key: str, status: str = "ok", exact: bool = True, **values: float | Sequence[float]) -> Cell:
    """The row of a cell with the values of metrics: exact ones, or the samples of measured ones."""
    measured: dict[str, Any] = {}
    for name, value in values.items():
        if name == "sent_bytes":
            measured["communication"] = [{"sent_bytes": value}]
        elif isinstance(value, (int, float)):
            measured[name] = value
        else:
            measured |= {name: statistics.median(value), name.replace("_s", "_samples_s"): list(value)}
    return raw(key, "virtual" if exact else "distributed", status, measurement=measured)


def record(
    number: int,
    *cells: Cell,
    machine: Mapping[str, object] = MACHINE,
    branch: str = "main",
    versions: Mapping[str, str] = VERSIONS,
) -> RunRecord:
    """The record of a nightly run, an hour after its commit."""
    of = commit(number, branch)
    date = (datetime.fromisoformat(of.date) + timedelta(hours=1)).isoformat(timespec="seconds")
    facts = {name: fact for name, fact in machine.items() if name != "host"}
    provenance = {**versions, "host": machine["host"], "machine": facts}
    rows = [Row.read({**row, "provenance": provenance}) for row in cells]
    return RunRecord("nightly", date, of, rows)


def nightly(
    folder: Path,
    commits: int,
    cells: Callable[[int, random.Random], Sequence[Cell]],
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
