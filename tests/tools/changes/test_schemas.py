"""github-action-benchmark and PyTorch HUD: what they take, as schemas made from their sources, and our
values."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.tools.changes.rows import SAMPLES
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

Entries = dict[str, dict[str, Any]]


@pytest.fixture
def entries(results: Path, tmp_path: Path, command_line: Run) -> dict[str, Entries]:
    """The entries of github-action-benchmark by tool and name."""
    code, _, err = command_line(
        "export", "--to", "github-action", str(results), "--output", str(tmp_path / "o")
    )
    assert code == 0, err
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "o").iterdir()}
    for array in found.values():
        jsonschema.validate(array, GITHUB_ACTION)
    return {tool: {entry["name"]: entry for entry in array} for tool, array in found.items()}


def test_github_action_benchmark_has_a_tool_for_each_direction(entries: dict[str, Entries]) -> None:
    smaller, bigger = entries["customSmallerIsBetter"], entries["customBiggerIsBetter"]
    assert {name.split("/")[-1] for name in smaller} == {
        *("sent_bytes", "formula_differences", "peak_memory_bytes", "reserved_memory_bytes", "step_time_s")
    }
    assert {name.split("/")[-1] for name in bigger} == {"answer", "tokens_per_s"}
    assert bigger["everything/c/found/answer"]["unit"] == "seq_len"


def test_bytes_are_exact_and_what_is_missing_is_no_zero(entries: dict[str, Entries]) -> None:
    smaller = entries["customSmallerIsBetter"]
    values = {name.removeprefix("everything/"): entry["value"] for name, entry in smaller.items()}
    assert values["a/exact/peak_memory_bytes"] == 15_509_396_481
    assert values["a/exact/sent_bytes"] == 6_383_206_414
    assert isinstance(values["a/exact/sent_bytes"], int)
    assert values["d/oom/peak_memory_bytes"] == 2**35
    assert "d/oom/step_time_s" not in values
    assert not [name for name in values if name.startswith(("e/", "f/", "g/"))]
    assert [name for name, value in values.items() if value == 0] == [
        f"{cell}/formula_differences" for cell in ("a/exact", "b/measured", "c/found")
    ]


def test_samples_have_a_range_and_each_entry_its_origin(entries: dict[str, Entries]) -> None:
    smaller = entries["customSmallerIsBetter"]
    assert smaller["everything/b/measured/step_time_s"]["range"] == "0.125 to 0.5 in 5 samples"
    assert "range" not in smaller["everything/a/exact/step_time_s"]
    extra = smaller["everything/d/oom/peak_memory_bytes"]["extra"].splitlines()
    assert extra[:3] == ["status: oom", "commit: 0123456789ab", "machine: any (the value is exact)"]
    assert "machine: here" in smaller["everything/b/measured/step_time_s"]["extra"]


def test_what_is_left_out_is_counted(results: Path, tmp_path: Path, command_line: Run) -> None:
    out = command_line("export", "--to", "github-action", str(results), "--output", str(tmp_path / "o"))[1]
    assert "everything: left out 3 cells without a value: 1 oom, 1 unsupported, 1 failed" in out


@pytest.fixture
def records(results: Path, command_line: Run) -> list[dict[str, Any]]:
    code, out, err = command_line("export", "--to", "hud", str(results))
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    jsonschema.validate(found, HUD)
    return found


def test_hud_values_are_mib_that_a_float32_holds(records: list[dict[str, Any]]) -> None:
    metrics = {
        (record["benchmark"]["extra_info"]["cell"], record["metric"]["name"]): record["metric"]
        for record in records
    }
    peak = metrics["a/exact", "peak_memory_mib"]
    (value,) = peak["benchmark_values"]
    assert peak["extra_info"]["unit"] == "MiB"
    (kept,) = struct.unpack("f", struct.pack("f", value))
    assert abs(kept * 2**20 - 15_509_396_481) <= 2**-24 * 15_509_396_481
    assert peak["extra_info"]["exact_value"] == "15509396481"
    assert metrics["b/measured", "step_time_s"]["benchmark_values"] == SAMPLES
    assert metrics["c/found", "answer"]["benchmark_values"] == [4096]


def test_hud_has_targets_in_the_unit_of_the_values(results: Path, tmp_path: Path, command_line: Run) -> None:
    (tmp_path / "targets.yaml").write_text(
        "targets:\n"
        "  - {suite: everything, cell: a/, metric: peak_memory_bytes, value: 1.5e10}\n"
        "  - {metric: step_time_s, machine: here, value: 0.5}\n"
    )
    code, out, err = command_line("export", "--to", "hud", str(results), "--targets", str(tmp_path))
    assert code == 0, err
    found = json.loads(out)
    jsonschema.validate(found, HUD)
    targets = {
        (record["benchmark"]["extra_info"]["cell"], record["metric"]["name"]): record["metric"][
            "target_value"
        ]
        for record in found
        if "target_value" in record["metric"]
    }
    assert targets == {("a/exact", "peak_memory_mib"): 1.5e10 / 2**20, ("b/measured", "step_time_s"): 0.5}


def test_a_hud_record_says_what_ran_where(records: list[dict[str, Any]]) -> None:
    record = next(r for r in records if r["benchmark"]["extra_info"]["cell"] == "b/measured")
    assert record["benchmark"]["name"] == "spbench everything"
    assert (record["benchmark"]["mode"], record["benchmark"]["dtype"]) == ("training", "fp16")
    assert (record["model"]["name"], record["model"]["backend"]) == ("bert-tiny", "tensor_parallel")
    assert record["inputs"]["seq_len"]["extra_info"] == {"value": "32"}
    assert record["inputs"]["mesh"]["extra_info"] == {"tp": "2"}
    assert record["dependencies"]["torch"]["version"] == "2.13.0"
    assert record["dependencies"]["spbench"]["sha"] == "0123456789ab"
    (runner,) = record["runners"]
    assert (runner["name"], runner["cpu_info"], runner["gpu_info"]) == ("here", "A CPU", "A GPU")
    assert (runner["avail_mem_in_gb"], runner["cpu_count"]) == (64, 4)
