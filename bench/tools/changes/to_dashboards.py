"""Exports for programs that draw or keep numbers: each has a line, an entry or a record a cell and metric;
exports.yaml says what it holds."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.git import commit_time_s
from spbench.bench.measure import with_band
from spbench.bench.tools.changes.export_command import (
    FORMS,
    Exported,
    ExportedValue,
    ExportRequest,
    integral,
)
from spbench.bench.tools.changes.metrics import readings
from spbench.bench.units import MIB
from spbench.impls import world_ranks
from spbench.plots.series import grouped


def _to_prometheus(request: ExportRequest) -> Exported:
    """One file with a gauge for each metric. The lines of a gauge are together, as the format asks."""
    lines = []
    for name, values in grouped(request.values(), lambda v: f"spbench_{v.reading.metric.name}").items():
        lines += [f"# TYPE {name} gauge", *(f"{name}{{{_labels(v)}}} {v.number}" for v in values)]
    return Exported("\n".join([*lines, "# EOF\n"]), request.left_out())


export_prometheus = _to_prometheus
"""Prometheus: OpenMetrics text 1.0, for a node exporter's textfile collector or a push gateway."""


def _labels(value: ExportedValue) -> str:
    labels = FORMS.record("prometheus", **value.about)
    for old, new in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
        labels = {name: text.replace(old, new) for name, text in labels.items()}
    return ",".join(f'{name}="{text}"' for name, text in labels.items())


#: the file of metrics whose smaller or bigger values are better, named after the tool that reads the file
_FILES = {"smaller": "customSmallerIsBetter.json", "bigger": "customBiggerIsBetter.json"}


def _to_github_action(request: ExportRequest) -> Exported:
    """A file for each tool; an empty file is left out, because the action refuses it. The action charts each
    name over commits: SUITE/CELL/METRIC, where the cell is a key with a digest of all settings. Values keep
    all digits, so that an alert threshold of 100% reports a single byte."""
    by_file = grouped(request.values(), lambda value: _FILES[value.reading.metric.better])
    entries = {
        file: [FORMS.record("github-action", **value.about) for value in some]
        for file, some in by_file.items()
    }
    return Exported(
        {file: json.dumps(some, indent=1) + "\n" for file, some in entries.items()}, request.left_out()
    )


export_github_action = _to_github_action
"""github-action-benchmark: a file for its tool customSmallerIsBetter and one for customBiggerIsBetter."""


def _to_hud(request: ExportRequest) -> Exported:
    """A record for each cell and metric. The table keeps values as Float32, with 24 binary digits: bytes go
    there as MiB, and exactly into the record's ``extra_info``."""
    records = [json.dumps(_hud_record(value, request.target(value))) for value in request.values()]
    return Exported("[\n" + ",\n".join(records) + "\n]\n", request.left_out())


export_hud = _to_hud
"""PyTorch HUD: benchmark records of schema version 3, as an array."""


def _hud_record(value: ExportedValue, target: float | None) -> dict[str, Any]:
    _, row, reading = value
    sizes, scale = row["cell"].get("sizes") or {}, MIB if reading.unit == "bytes" else 1
    return FORMS.record(
        "hud",
        **value.about,
        scale=scale,
        values=[number / scale for number in reading.samples or (reading.value,)],
        target=target,
        banded=with_band(row)["measurement"],
        mesh={axis: str(size) for axis, size in sizes.items()},
        ranks=world_ranks(sizes),
    )


#: the metrics that are times; a row has at most one of them
_TIMES = ("step_time_s", "time_s")


def _to_pytest_benchmark(request: ExportRequest) -> Exported:
    """A benchmark called SUITE/CELL for each cell that has a time, in the group of its suite; its samples are
    rounds. Other metrics are in ``extra_info``, with exact bytes; pytest-benchmark's tables lack them.

    Raises:
        UserError: pytest-benchmark, which computes the statistics, is not installed; or no cell has a time.
    """
    try:
        import pytest_benchmark
    except ImportError as error:
        raise UserError(f"{error}: pip install pytest-benchmark, whose statistics are exported") from error
    benchmarks = [*_benchmarks(request)]
    origins = [suite.origin(row) for suite in request.suites for row in suite.rows]
    newest = max(origins, key=lambda origin: origin.time)
    seconds = commit_time_s(newest.commit, request.suites[0].path)
    content = FORMS.record(
        "pytest-benchmark",
        origin=newest,
        facts=newest.machine,
        time=None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(),
        now=datetime.now(UTC).isoformat(),
        benchmarks=benchmarks,
        version=pytest_benchmark.__version__,
    )
    return Exported(json.dumps(content, indent=1) + "\n", request.left_out(*_TIMES))


export_pytest_benchmark = _to_pytest_benchmark
"""pytest-benchmark: the JSON of its --benchmark-json, for `pytest-benchmark compare` and what else reads
it."""


def _benchmarks(request: ExportRequest) -> Iterator[dict[str, Any]]:
    from pytest_benchmark.stats import Stats

    for value in request.values(*_TIMES):
        stats = Stats()
        for sample in value.reading.samples or (value.reading.value,):
            stats.update(sample)
        numbers = readings(value.row).items()
        others = {name: integral(reading.value) for name, reading in numbers if name not in _TIMES}
        of_samples = stats.as_dict() | {"data": stats.data, "iterations": 1}
        yield FORMS.record("pytest-benchmark entry", **value.about, others=others, stats=of_samples)
