"""github-action-benchmark and PyTorch HUD: what they take, as schemas made from their sources, and our
values."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import jsonschema

from tests.tools.commands.conftest import Run

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}

#: `BenchmarkResult` of src/extract.ts of benchmark-action/github-action-benchmark at c38cce9, without the
#: conversions that it would make; an empty array it refuses
GITHUB_ACTION = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["name", "value", "unit"],
        "properties": {"name": TEXT, "value": {"type": "number"}, "range": TEXT, "unit": TEXT, "extra": TEXT},
        "additionalProperties": False,
    },
}


def parts(**properties: Any) -> dict[str, Any]:
    """A tuple of ClickHouse: no names but these."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


EXTRA = {"type": "object", "additionalProperties": TEXT}

#: the columns that a benchmark fills of benchmark.oss_ci_benchmark_v3 in pytorch/test-infra at 61a7757
#: (clickhouse_db_schema); its upload script adds the others
HUD = {
    "type": "array",
    "minItems": 1,
    "items": {
        **parts(
            benchmark=parts(name=TEXT, mode=TEXT, dtype=TEXT, extra_info=EXTRA),
            model=parts(
                name=TEXT, type=TEXT, backend=TEXT, origins={"type": "array", "items": TEXT}, extra_info=EXTRA
            ),
            metric=parts(
                name=TEXT,
                benchmark_values={"type": "array", "items": {"type": "number"}, "minItems": 1},
                target_value={"type": "number"},
                extra_info=EXTRA,
            ),
            inputs={"type": "object", "additionalProperties": parts(dtype=TEXT, extra_info=EXTRA)},
            dependencies={
                "type": "object",
                "additionalProperties": parts(
                    repo=TEXT, branch=TEXT, sha=TEXT, version=TEXT, extra_info=EXTRA
                ),
            },
            runners={
                "type": "array",
                "items": parts(
                    **dict.fromkeys(
                        ("name", "type", "cpu_info", "mem_info", "gpu_info", "gpu_mem_info"), TEXT
                    ),
                    **dict.fromkeys(
                        ("cpu_count", "avail_mem_in_gb", "gpu_count", "avail_gpu_mem_in_gb"), COUNT
                    ),
                    extra_info=EXTRA,
                ),
            },
        ),
        "required": ["benchmark", "model", "metric"],
    },
}


def test_both_take_what_is_exported(results: Path, tmp_path: Path, command_line: Run) -> None:
    """Of HUD also that a Float32, which it keeps, holds the MiB."""
    words = ("export", str(results), "--output", str(tmp_path / "o"), "--to")
    assert command_line(*words, "github-action")[0] == 0
    for path in (tmp_path / "o").iterdir():
        jsonschema.validate(json.loads(path.read_text()), GITHUB_ACTION)
    records = json.loads(command_line("export", str(results), "--to", "hud")[1])
    jsonschema.validate(records, HUD)
    peaks = [record["metric"] for record in records if record["metric"]["name"] == "peak_memory_mib"]
    assert len(peaks) == 4
    for peak in peaks:
        (kept,) = struct.unpack("f", struct.pack("f", *peak["benchmark_values"]))
        exact = int(peak["extra_info"]["exact_value"])
        assert abs(kept * 2**20 - exact) <= 2**-24 * exact
