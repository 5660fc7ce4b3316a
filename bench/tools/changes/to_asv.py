"""airspeed velocity (asv): a results folder, version 2, for `asv publish`.

A benchmark is SUITE.STRATEGY.METRIC with the cells as the values of its one parameter. Exact numbers belong
to a machine called any, so that their lines do not break where another machine runs the same code; measured
ones to their host. The folder is one to be added to: a commit is a file, and benchmarks.json grows by the
cells that are new. asv has no directions: it takes every increase for a regression.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.git import commit_time_s
from spbench.bench.measure.sweep.results import FAULTS, Row
from spbench.bench.tools.changes.exported import Exported, ExportRequest, whole
from spbench.bench.tools.changes.metrics import METRICS, Metric, Reading, has_exact_engine, readings
from spbench.bench.tools.changes.suite import WITH_VALUES, Origin, Suite

#: of results and benchmarks.json (asv.results.Results.api_version), and of machine.json
RESULTS_VERSION, MACHINE_VERSION = 2, 1
#: of a benchmark's meaning: asv shows only results of the version that benchmarks.json has
BENCHMARK_VERSION = "1"
BENCHMARKS_FILE = "benchmarks.json"
ANY_MACHINE = "any"

COLUMNS = (
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"),
    *("stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples", "profile"),
)
#: the units that asv scales in its charts
UNITS = {"s": "seconds"}

Benchmarks = dict[str, dict[str, Any]]


def export(request: ExportRequest) -> Exported:
    """machine.json of each machine, benchmarks.json and, last, the results of each commit.

    Raises:
        UserError: no cell has a value, a commit is not one that git knows here, or the benchmarks.json in the
            output folder cannot be read.
    """
    request.values()
    files: dict[str, str] = {}
    results: dict[str, str] = {}
    benchmarks = _earlier(request.output / BENCHMARKS_FILE) if request.output else {}
    for suite in request.suites:
        for (machine, commit), rows in _by_machine_and_commit(suite).items():
            found = _results(suite, rows, benchmarks)
            origin = suite.origin(rows[-1])
            files[f"{machine}/machine.json"] = _json(_machine(machine, origin), MACHINE_VERSION)
            results[f"{machine}/{commit[:8]}-{suite.name}.json"] = _json(
                {
                    "commit_hash": commit,
                    "env_name": suite.name,
                    "date": 1000 * _known_time_s(commit, suite),
                    "params": {"machine": machine},
                    "python": ".".join(origin.versions.get("python", "").split(".")[:2]),
                    "requirements": {"torch": origin.versions.get("torch", "")},
                    "env_vars": {},
                    "result_columns": COLUMNS,
                    "results": found,
                    "durations": {},
                },
                RESULTS_VERSION,
            )
    files[BENCHMARKS_FILE] = _json(benchmarks, RESULTS_VERSION)
    return Exported({**files, **results}, request.left_out())


def _by_machine_and_commit(suite: Suite) -> dict[tuple[str, str], list[Row]]:
    by_place = defaultdict(list)
    for row in suite.rows:
        origin = suite.origin(row)
        by_place[ANY_MACHINE if has_exact_engine(row) else origin.host or "unknown", origin.commit].append(
            row
        )
    return by_place


def _known_time_s(commit: str, suite: Suite) -> int:
    seconds = commit_time_s(commit, suite.results.path) if commit else None
    if seconds is None:
        raise UserError(
            f"{suite.name}: asv shows results by commit, and git knows no commit {commit or '(none)'} here; "
            "export in the checkout that was measured, or name the commit by --commit"
        )
    return seconds


def _results(suite: Suite, rows: list[Row], benchmarks: Benchmarks) -> dict[str, list[Any]]:
    """The results by benchmark, which are added to ``benchmarks`` if they are new."""
    cells: dict[str, dict[str, tuple[Row, Reading | None]]] = defaultdict(dict)
    for row in rows:
        read = readings(row) if row["status"] in WITH_VALUES else {}
        for metric in METRICS:
            reading = read.get(metric.name)
            if reading is not None or metric.name == "peak_memory_bytes":  # which shows that there is none
                unit = reading.unit if reading else metric.unit
                name = _added(benchmarks, suite, row, metric, unit)
                cells[name][row["key"]] = (row, reading)
    return {name: _columns(values) for name, values in cells.items()}


def _added(benchmarks: Benchmarks, suite: Suite, row: Row, metric: Metric, unit: str) -> str:
    """The name of the benchmark of a metric, after its cell is among the parameter's values."""
    of = metric.name if metric.unit else f"{metric.name}_{unit}"
    name = f"{suite.name}.{row['cell'].get('strategy') or row['key']}.{of}"
    benchmark = benchmarks.setdefault(
        name,
        {
            "name": name,
            "type": "track",
            "unit": UNITS.get(unit, unit),
            "version": BENCHMARK_VERSION,
            "code": f"{metric.name}: {metric.better} is better",
            "param_names": ["cell"],
            "params": [[]],
        },
    )
    if row["key"] not in benchmark["params"][0]:
        benchmark["params"][0].append(row["key"])
    return name


def _columns(cells: Mapping[str, tuple[Row, Reading | None]]) -> list[Any]:
    """The columns of one benchmark, each with a value a cell; blank ones at the end are left out."""
    samples = [list(reading.samples) if reading else [] for _, reading in cells.values()]
    quartiles = [
        statistics.quantiles(taken, method="inclusive") if len(taken) > 1 else None for taken in samples
    ]
    by_column = {
        "result": [_value(row, reading) for row, reading in cells.values()],
        "params": [list(cells)],
        "version": BENCHMARK_VERSION,
    }
    if any(samples):
        by_column |= {
            "stats_q_25": [three[0] if three else None for three in quartiles],
            "stats_q_75": [three[2] if three else None for three in quartiles],
            "stats_number": [1 if taken else None for taken in samples],
            "stats_repeat": [len(taken) or None for taken in samples],
            "samples": [taken or None for taken in samples],
        }
    columns = [by_column.get(column) for column in COLUMNS]
    while columns[-1] is None:
        columns.pop()
    return columns


def _value(row: Row, reading: Reading | None) -> float | None:
    """A number; None of a cell that failed, and not-a-number of one that cannot be, as asv has them."""
    if reading is not None:
        return whole(reading.value)
    return None if row["status"] in FAULTS else math.nan


def _machine(name: str, origin: Origin) -> dict[str, str]:
    facts = {} if name == ANY_MACHINE else origin.machine
    memory = facts.get("memory_bytes")
    return {
        "machine": name,
        "os": str(facts.get("os") or ""),
        "arch": "",
        "cpu": str(facts.get("cpu") or ""),
        "num_cpu": str(facts.get("cores") or ""),
        "ram": str(memory // 2**10) if memory else "",
    }


def _earlier(path: Path) -> Benchmarks:
    """The benchmarks of earlier exports into the same folder."""
    if not path.exists():
        return {}
    try:
        benchmarks = json.loads(path.read_text(encoding="utf-8"))
        if benchmarks.pop("version", None) != RESULTS_VERSION:
            raise ValueError(f"not of version {RESULTS_VERSION}")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"cannot add to {path}: {error}") from error
    return benchmarks


def _json(content: Mapping[str, Any], version: int) -> str:
    return json.dumps({**content, "version": version}, indent=1) + "\n"
