"""PyTorch HUD: benchmark records of schema version 3, as an array.

The records have the parts ``benchmark``, ``model``, ``metric``, ``inputs``, ``dependencies`` and ``runners``
of the table ``benchmark.oss_ci_benchmark_v3`` of pytorch/test-infra; its upload script adds repository,
workflow and commit. The table keeps values as Float32, with 24 binary digits: bytes go there as MiB, and
exactly into the record's ``extra_info``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spbench.bench.measure import with_band
from spbench.bench.tools.changes.export_command import Exported, ExportedValue, ExportRequest, integral
from spbench.bench.tools.changes.metrics import Reading
from spbench.bench.tools.changes.result_files import Origin
from spbench.bench.units import GIB, MIB
from spbench.impls import world_ranks

#: of the interval of a simulated step time
_ENDS = ("step_time_low_s", "step_time_high_s")


def export(request: ExportRequest) -> Exported:
    """A record for each cell and metric.

    Raises:
        UserError: no cell has a value.
    """
    records = [json.dumps(_record(value, request.target(value))) for value in request.values()]
    return Exported("[\n" + ",\n".join(records) + "\n]\n", request.left_out())


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
    """The machine that measured; ``type`` is the cluster, which virtual ranks only play."""
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
