"""Exports for programs that draw or keep numbers: each has a line, an entry or a record a cell and metric;
exports.yaml says what it holds."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.git import commit_time_s
from spbench.bench.measure import with_band
from spbench.bench.row import FAULTS, Row
from spbench.bench.tools.changes.export_command import (
    FORMS,
    WITH_VALUES,
    Exported,
    ExportedValue,
    ExportRequest,
    integral,
)
from spbench.bench.tools.changes.judgement import Suite
from spbench.bench.tools.changes.metrics import METRICS, Reading, has_exact_engine, readings
from spbench.bench.units import MIB
from spbench.impls import world_ranks
from spbench.plots.series import grouped


def export_prometheus(request: ExportRequest) -> Exported:
    """Prometheus: OpenMetrics text 1.0, for a node exporter's textfile collector or a push gateway. Each
    metric has a gauge. The lines of a gauge are together, as the format asks."""
    lines = []
    for name, values in grouped(request.values(), lambda v: f"spbench_{v.reading.metric.name}").items():
        lines += [f"# TYPE {name} gauge", *(f"{name}{{{_labels(v)}}} {v.number}" for v in values)]
    return Exported("\n".join([*lines, "# EOF\n"]), request.left_out())


def _labels(value: ExportedValue) -> str:
    labels = FORMS.record("prometheus", **value.about)
    for old, new in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
        labels = {name: text.replace(old, new) for name, text in labels.items()}
    return ",".join(f'{name}="{text}"' for name, text in labels.items())


def export_github_action(request: ExportRequest) -> Exported:
    """github-action-benchmark: a file for its tool customSmallerIsBetter and one for customBiggerIsBetter. An
    empty file is left out, because the action refuses it. The action charts each name over commits:
    SUITE/CELL/METRIC, where the cell is a key with a digest of all settings. Values keep all digits, so that
    an alert threshold of 100% reports a single byte."""
    texts = {}
    for better, values in grouped(request.values(), lambda value: value.reading.metric.better).items():
        entries = [FORMS.record("github-action", **value.about) for value in values]
        texts[f"custom{better.capitalize()}IsBetter.json"] = json.dumps(entries, indent=1) + "\n"
    return Exported(texts, request.left_out())


def export_hud(request: ExportRequest) -> Exported:
    """PyTorch HUD: benchmark records of schema version 3, as an array. Each cell and metric has a record. The
    table keeps values as Float32, with 24 binary digits: bytes go there as MiB, and exactly into the record's
    ``extra_info``."""
    records = [json.dumps(_hud_record(value, request.target(value))) for value in request.values()]
    return Exported("[\n" + ",\n".join(records) + "\n]\n", request.left_out())


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


def export_pytest_benchmark(request: ExportRequest) -> Exported:
    """pytest-benchmark: the JSON of its --benchmark-json, for `pytest-benchmark compare` and what else reads
    it. A benchmark called SUITE/CELL for each cell that has a time, in the group of its suite; its samples
    are rounds. Other metrics are in ``extra_info``, with exact bytes; pytest-benchmark's tables lack them.

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


#: asv's versions of results and benchmarks.json (asv.results.Results.api_version), and of machine.json
RESULTS_VERSION, MACHINE_VERSION = 2, 1
#: version of a benchmark's meaning: asv shows only results of the version in benchmarks.json
BENCHMARK_VERSION = "1"
BENCHMARKS_FILE = "benchmarks.json"
ANY_MACHINE = "any"

COLUMNS = (
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"),
    *("stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples", "profile"),
)

Benchmarks = dict[str, dict[str, Any]]
#: the key of a cell, and a reading of it
_Entry = tuple[str, Reading]


def export_asv(request: ExportRequest) -> Exported:
    """airspeed velocity (asv): a results folder, version 2, for `asv publish`. The files are machine.json of
    each machine, benchmarks.json and, last, the results of each commit.

    A benchmark is SUITE.STRATEGY.METRIC with the cells as the values of its one parameter. Exact numbers
    belong to a machine called "any", so that their lines do not break where another machine runs the same
    code; measured numbers belong to their host. Each export adds to the folder: a commit is a file, and
    benchmarks.json grows by the cells that are new. asv has no directions: it takes every increase for a
    regression.

    Raises:
        UserError: no cell has a value, git does not know a commit in the results' folder, or the
            benchmarks.json in the output folder cannot be read.
    """
    request.values()
    files: dict[str, str] = {}
    results: dict[str, str] = {}
    benchmarks = _read_benchmarks(request.output / BENCHMARKS_FILE) if request.output else {}
    for suite in request.suites:
        by_place = defaultdict(list)
        for row in suite.rows:
            origin = suite.origin(row)
            machine = ANY_MACHINE if has_exact_engine(row) else origin.host or "unknown"
            by_place[machine, origin.commit].append(row)
        for (machine, commit), rows in by_place.items():
            origin = suite.origin(rows[-1])
            entries = _by_benchmark(suite, rows, benchmarks)
            about = FORMS.record(
                "asv machine", machine=machine, facts={} if machine == ANY_MACHINE else origin.machine
            )
            files[f"{machine}/machine.json"] = _json(about, MACHINE_VERSION)
            content = FORMS.record(
                "asv results",
                suite=suite,
                origin=origin,
                machine=machine,
                commit=commit,
                time=_commit_time_s(commit, suite),
                columns=COLUMNS,
                benchmarks={name: _columns(cells) for name, cells in entries.items()},
            )
            results[f"{machine}/{commit[:8]}-{suite.name}.json"] = _json(content, RESULTS_VERSION)
    files[BENCHMARKS_FILE] = _json(benchmarks, RESULTS_VERSION)
    return Exported({**files, **results}, request.left_out())


def _commit_time_s(commit: str, suite: Suite) -> int:
    if (seconds := commit_time_s(commit, suite.path) if commit else None) is None:
        raise UserError(
            f"{suite.name}: asv shows results by commit, and git knows no commit {commit or '(none)'} here; "
            "export in the checkout that was measured, or name the commit by --commit"
        )
    return seconds


def _entries(row: Row) -> Iterator[_Entry]:
    """The readings of a cell, each with the cell's key, and always one of peak memory, whose value in asv's
    form is None for a cell that failed, and NaN for a cell that cannot run."""
    values = readings(row) if row["status"] in WITH_VALUES else {}
    absent: Any = None if row["status"] in FAULTS else math.nan
    for metric in METRICS:
        if metric.name in values or metric.name == "peak_memory_bytes":
            yield row["key"], values.get(metric.name) or Reading(metric, absent, metric.unit, exact=True)


def _by_benchmark(suite: Suite, rows: Sequence[Row], benchmarks: Benchmarks) -> dict[str, list[_Entry]]:
    """The metrics of cells by benchmark name; new benchmarks and cells are added to ``benchmarks``."""
    by_name: dict[str, list[_Entry]] = defaultdict(list)
    for row, key, reading in ((each, *entry) for each in rows for entry in _entries(each)):
        metric, unit = reading.metric, reading.unit
        quantity = metric.name if metric.unit else f"{metric.name}_{unit}"
        name = f"{suite.name}.{row['cell'].get('strategy') or row['key']}.{quantity}"
        if name not in benchmarks:
            of_metric = {"metric": metric, "unit": unit, "version": BENCHMARK_VERSION}
            benchmarks[name] = FORMS.record("asv benchmark", name=name, **of_metric)
        of_cells = benchmarks[name]["params"][0]
        if key not in of_cells:
            of_cells.append(key)
        by_name[name].append((key, reading))
    return by_name


def _columns(cells: Sequence[_Entry]) -> list[Any]:
    """The columns of one benchmark, each with a value for each cell; blank last columns are left out."""

    def line(reading: Reading) -> dict[str, Any]:
        several = len(reading.samples) > 1
        quartiles = statistics.quantiles(reading.samples, method="inclusive") if several else []
        value = None if reading.value is None else integral(reading.value)
        return FORMS.record("asv cell", reading, value=value, quartiles=quartiles)

    lines = [line(reading) for _, reading in cells]
    by_column: dict[str, Any] = {name: [each[name] for each in lines] for name in lines[0]}
    by_column |= {"params": [[key for key, _ in cells]], "version": BENCHMARK_VERSION}
    return [by_column.get(column) for column in COLUMNS[: -1 if any(by_column["samples"]) else 3]]


def _read_benchmarks(path: Path) -> Benchmarks:
    """The benchmarks that earlier exports wrote to ``path``; empty if the file does not exist."""
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
