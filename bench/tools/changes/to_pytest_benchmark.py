"""pytest-benchmark: the JSON of its --benchmark-json, for `pytest-benchmark compare` and what else reads it.

A benchmark there is a time, so that cells have their step time, with its samples as rounds. All other metrics
stand in ``extra_info``, which keeps bytes exact but takes no part in its tables.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.git import commit_time_s
from spbench.bench.tools.changes.export_command import Exported, ExportedValue, ExportRequest, integral
from spbench.bench.tools.changes.metrics import readings
from spbench.bench.tools.changes.result_files import Origin

#: the metrics that are times, of which a row has one
TIMES = ("step_time_s", "time_s")

#: of a cell, that `--group-by param:NAME` may name
PARAMETERS = ("model", "strategy", "sizes", "batch", "seq_len", "precision", "cluster", "engine", "variant")


def export(request: ExportRequest) -> Exported:
    """A benchmark for each cell with a step time, called SUITE/CELL, in the group of its suite.

    Raises:
        UserError: pytest-benchmark, which counts the statistics, is not installed; or no cell has a time.
    """
    try:
        import pytest_benchmark
        from pytest_benchmark.stats import Stats
    except ImportError as error:
        raise UserError(f"{error}: pip install pytest-benchmark, whose statistics are exported") from error
    benchmarks = []
    for value in request.values(*TIMES):
        stats = Stats()
        for sample in value.reading.samples or (value.reading.value,):
            stats.update(sample)
        benchmarks.append(_benchmark(value, stats.as_dict() | {"data": stats.data, "iterations": 1}))
    origins = [suite.origin(row) for suite in request.suites for row in suite.rows]
    newest = max(origins, key=lambda origin: origin.time)
    content = {
        **_origin(newest, request.suites[0].results.path),
        "benchmarks": benchmarks,
        "datetime": newest.time or datetime.now(UTC).isoformat(),
        "version": pytest_benchmark.__version__,
    }
    return Exported(json.dumps(content, indent=1) + "\n", request.left_out(*TIMES))


def _benchmark(value: ExportedValue, stats: dict[str, Any]) -> dict[str, Any]:
    suite, row, _ = value
    others = {name: integral(reading.value) for name, reading in readings(row).items() if name not in TIMES}
    return {
        "group": suite.name,
        "name": row["key"],
        "fullname": f"{suite.name}/{row['key']}",
        "params": {name: row["cell"].get(name) for name in PARAMETERS},
        "param": row["key"],
        "extra_info": {**others, "status": row["status"], **value.origin.versions},
        "options": {},
        "stats": stats,
    }


def _origin(origin: Origin, near: Path) -> dict[str, Any]:
    """Machine and commit."""
    facts, seconds = origin.machine, commit_time_s(origin.commit, near)
    system, _, release = str(facts.get("os") or "").partition(" ")
    return {
        "machine_info": {
            "node": origin.host,
            "system": system,
            "release": release,
            "python_version": origin.versions.get("python", ""),
            "cpu": {"brand_raw": facts.get("cpu") or "", "count": facts.get("cores")},
        },
        "commit_info": {
            "id": origin.commit or "unversioned",
            "time": None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(),
            "author_time": None,
            "dirty": origin.dirty,
            "project": "spbench",
            "branch": "(unknown)",
        },
    }
