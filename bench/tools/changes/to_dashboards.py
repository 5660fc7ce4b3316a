"""Exports for programs that draw or keep numbers: each has a line, an entry or a record a cell and metric."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.git import commit_time_s
from spbench.bench.measure import with_band
from spbench.bench.tools.changes.export_command import Exported, ExportedValue, ExportRequest, integral
from spbench.bench.tools.changes.metrics import Reading, readings
from spbench.bench.tools.changes.result_files import Origin
from spbench.bench.units import GIB, MIB
from spbench.impls import world_ranks
from spbench.plots.series import grouped

# -- Prometheus ------------------------------------------------------------------------------------------


def _to_prometheus(request: ExportRequest) -> Exported:
    """One file with a gauge for each metric. The lines of a gauge are together, as the format asks; labels
    are suite, cell, unit, model, strategy, cluster and engine. UserError if no cell has a value."""
    lines = []
    for name, values in grouped(request.values(), lambda v: f"spbench_{v.reading.metric.name}").items():
        lines += [f"# TYPE {name} gauge", *(f"{name}{{{_labels(v)}}} {v.number}" for v in values)]
    return Exported("\n".join([*lines, "# EOF\n"]), request.left_out())


export_prometheus = _to_prometheus
"""Prometheus: OpenMetrics text 1.0, for a node exporter's textfile collector or a push gateway."""


def _labels(value: ExportedValue) -> str:
    cell = value.row["cell"]
    labels = {"suite": value.suite.name, "cell": value.row["key"], "unit": value.reading.unit}
    labels |= {name: str(cell.get(name) or "") for name in ("model", "strategy", "cluster", "engine")}
    for old, new in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
        labels = {name: text.replace(old, new) for name, text in labels.items()}
    return ",".join(f'{name}="{text}"' for name, text in labels.items())


# -- github-action-benchmark -----------------------------------------------------------------------------

#: the file of metrics whose smaller or bigger values are better, named after the tool that reads the file
_FILES = {"smaller": "customSmallerIsBetter.json", "bigger": "customBiggerIsBetter.json"}


def _to_github_action(request: ExportRequest) -> Exported:
    """A file for each tool, an array of ``{name, value, unit, range, extra}``, as the action's README shows
    under "Examples"; an empty file is left out, because the action refuses it. The action charts each name
    over commits: SUITE/CELL/METRIC, where the cell is a key with a digest of all settings. Values keep all
    digits, so that an alert threshold of 100% reports a single byte. UserError if no cell has a value."""
    by_file = grouped(request.values(), lambda value: _FILES[value.reading.metric.better])
    contents = {file: json.dumps([*map(_entry, some)], indent=1) + "\n" for file, some in by_file.items()}
    return Exported(contents, request.left_out())


export_github_action = _to_github_action
"""github-action-benchmark: a file for its tool customSmallerIsBetter and one for customBiggerIsBetter."""


def _entry(value: ExportedValue) -> dict[str, Any]:
    reading, origin, samples = value.reading, value.origin, value.reading.samples
    extra = {
        "status": value.row["status"],
        "commit": origin.shown_commit,
        "machine": "any (the value is exact)" if reading.exact else origin.host or "unknown",
        **origin.versions,
    }
    entry = {
        "name": f"{value.suite.name}/{value.row['key']}/{reading.metric.name}",
        "value": value.number,
        "unit": reading.unit,
        "extra": "\n".join(f"{name}: {text}" for name, text in extra.items()),
    }
    if samples:
        entry["range"] = f"{min(samples):.6g} to {max(samples):.6g} in {len(samples)} samples"
    return entry


# -- PyTorch HUD -----------------------------------------------------------------------------------------

#: the fields with the lower and upper end of a simulated step time's interval
_ENDS = ("step_time_low_s", "step_time_high_s")


def _to_hud(request: ExportRequest) -> Exported:
    """A record for each cell and metric, with the parts ``benchmark``, ``model``, ``metric``, ``inputs``,
    ``dependencies`` and ``runners`` of the table ``benchmark.oss_ci_benchmark_v3`` of pytorch/test-infra; its
    upload script adds repository, workflow and commit. The table keeps values as Float32, with 24 binary
    digits: bytes go there as MiB, and exactly into the record's ``extra_info``. UserError if no cell has a
    value."""
    records = [json.dumps(_record(value, request.target(value))) for value in request.values()]
    return Exported("[\n" + ",\n".join(records) + "\n]\n", request.left_out())


export_hud = _to_hud
"""PyTorch HUD: benchmark records of schema version 3, as an array."""


def _record(value: ExportedValue, target: float | None) -> dict[str, Any]:
    suite, row, reading = value
    cell, origin = row["cell"], value.origin
    training = cell.get("training") or {}
    sizes = {axis: str(size) for axis, size in (cell.get("sizes") or {}).items()}
    return {
        "benchmark": {
            "name": f"spbench {suite.name}",
            "mode": training.get("step", "training"),
            "dtype": cell.get("precision") or "",
            "extra_info": {"cell": row["key"], "status": row["status"], "engine": cell.get("engine") or ""},
        },
        "model": {
            "name": cell.get("model") or "",
            "type": "sequence parallelism",
            "backend": cell.get("strategy") or "",
            "origins": ["spbench"],
            "extra_info": {"variant": cell.get("variant") or ""},
        },
        "metric": _metric(reading, target, with_band(row)["measurement"]),
        "inputs": {
            name: {"dtype": "", "extra_info": {"value": str(cell[name])}}
            for name in ("batch", "seq_len")
            if cell.get(name) is not None
        }
        | {"mesh": {"dtype": "", "extra_info": sizes}},
        "dependencies": _dependencies(origin),
        "runners": [_runner(cell, origin)],
    }


def _metric(reading: Reading, target: float | None, measured: Mapping[str, Any]) -> dict[str, Any]:
    in_mib = reading.unit == "bytes"
    unit = MIB if in_mib else 1
    name = reading.metric.name
    return {
        "name": name.replace("_bytes", "_mib") if in_mib and "_bytes" in name else name,
        "benchmark_values": [value / unit for value in reading.samples or (reading.value,)],
        **({} if target is None else {"target_value": target / unit}),
        "extra_info": {
            "unit": "MiB" if in_mib else reading.unit,
            "exact_value": str(integral(reading.value)),
            "exact_unit": reading.unit,
            "better": reading.metric.better,
            "is_exact": str(reading.exact).lower(),
            **{end: str(measured[end]) for end in _ENDS if name == "step_time_s" and end in measured},
        },
    }


def _dependencies(origin: Origin) -> dict[str, Any]:
    sources = {
        "spbench": {"sha": origin.commit, "version": origin.versions.get("spbench", "")},
        "torch": {"repo": "pytorch/pytorch", "version": origin.versions.get("torch", "")},
    }
    blank = {"repo": "", "branch": "", "sha": "", "version": "", "extra_info": {}}
    return {name: blank | facts for name, facts in sources.items()}


def _runner(cell: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """The machine that ran the cell; ``type`` is the cell's cluster, which virtual ranks only simulate."""
    facts = origin.machine
    gpus = facts.get("gpus") or []
    return {
        "name": origin.host,
        "type": cell.get("cluster") or "",
        "cpu_info": facts.get("cpu") or "",
        "cpu_count": facts.get("cores") or 0,
        "mem_info": "",
        "avail_mem_in_gb": (facts.get("memory_bytes") or 0) // GIB,
        "gpu_info": gpus[0] if gpus else "",
        "gpu_count": len(gpus),
        "gpu_mem_info": "",
        "avail_gpu_mem_in_gb": 0,
        "extra_info": {"world_size": str(world_ranks(cell.get("sizes") or {}))},
    }


# -- pytest-benchmark ------------------------------------------------------------------------------------

#: the metrics that are times; a row has at most one of them
_TIMES = ("step_time_s", "time_s")
#: settings of a cell that `--group-by param:NAME` may name
_PARAMETERS = ("model", "strategy", "sizes", "batch", "seq_len", "precision", "cluster", "engine", "variant")


def _to_pytest_benchmark(request: ExportRequest) -> Exported:
    """A benchmark called SUITE/CELL for each cell that has a time, in the group of its suite; its samples are
    rounds. Other metrics are in ``extra_info``, with exact bytes; pytest-benchmark's tables lack them.

    Raises:
        UserError: pytest-benchmark, which computes the statistics, is not installed; or no cell has a time.
    """
    try:
        import pytest_benchmark
        from pytest_benchmark.stats import Stats
    except ImportError as error:
        raise UserError(f"{error}: pip install pytest-benchmark, whose statistics are exported") from error
    benchmarks = []
    for value in request.values(*_TIMES):
        stats = Stats()
        for sample in value.reading.samples or (value.reading.value,):
            stats.update(sample)
        benchmarks.append(_benchmark(value, stats.as_dict() | {"data": stats.data, "iterations": 1}))
    origins = [suite.origin(row) for suite in request.suites for row in suite.rows]
    newest = max(origins, key=lambda origin: origin.time)
    content = {
        **_origin(newest, request.suites[0].path),
        "benchmarks": benchmarks,
        "datetime": newest.time or datetime.now(UTC).isoformat(),
        "version": pytest_benchmark.__version__,
    }
    return Exported(json.dumps(content, indent=1) + "\n", request.left_out(*_TIMES))


export_pytest_benchmark = _to_pytest_benchmark
"""pytest-benchmark: the JSON of its --benchmark-json, for `pytest-benchmark compare` and what else reads
it."""


def _benchmark(value: ExportedValue, stats: dict[str, Any]) -> dict[str, Any]:
    suite, row, _ = value
    others = {name: integral(reading.value) for name, reading in readings(row).items() if name not in _TIMES}
    return {
        "group": suite.name,
        "name": row["key"],
        "fullname": f"{suite.name}/{row['key']}",
        "params": {name: row["cell"].get(name) for name in _PARAMETERS},
        "param": row["key"],
        "extra_info": {**others, "status": row["status"], **value.origin.versions},
        "options": {},
        "stats": stats,
    }


def _origin(origin: Origin, near: Path) -> dict[str, Any]:
    """The entries ``machine_info`` and ``commit_info``; git looks the commit up in the folder ``near``."""
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
