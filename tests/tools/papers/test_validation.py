"""The table "validated against real machines": what it says of records, and of the committed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.tools.papers.sources import MEASURED, measured_sources, papers, published_file
from spbench.bench.tools.papers.validation import PREDICTORS_FILE, predictor_errors, validation_lines

ROOT = Path(__file__).parents[3]
B200 = "megatron_b200_llama3.csv"


def record(
    source: str, quantity: str, error: float | None, role: str = "predicted", **other: Any
) -> dict[str, Any]:
    """A record of measured.csv, of a cell and row of its own unless given."""
    return {
        "table": f"t: {source}",
        "cell": source,
        "quantity": quantity,
        "published": 10.0,
        "reproduced": None if error is None else 10 * (1 + error),
        "relative_error": error,
        "status_published": "ok",
        "role": role,
        "source": source,
        **other,
    }


def test_errors_are_counted_by_source_and_quantity() -> None:
    records = [
        record(f"{B200}:1:peak:0", "peak_memory_gib", 0.001, "inferred"),
        record(f"{B200}:1:peak:1", "peak_memory_gib", -0.004, "inferred"),
        record(f"{B200}:2:peak:0", "peak_memory_gib", None, "inferred"),
        record(f"{B200}:2:real_ms", "step_time_ms", -0.05),
        # the same number in a second variant counts once
        record(f"{B200}:2:real_ms", "step_time_ms", 0.5),
        record("megatron_lm_goldens.csv:4:iter_s", "step_time_ms", 0.2, "calibrated"),
    ]
    goldens, memory, simumax_memory, time, simumax_time, *others = validation_lines(records)
    assert list(goldens.values()) == [
        *("spbench", "Megatron-LM's functional tests, 8 A100, H100 or GB200", "step time", 1),
        *("20.0%", "20.0%", "20.0%", "1 calibrated"),
    ]
    assert list(memory.values())[2:] == ["peak memory", 2, "0.25%", "0.25%", "0.4%", "3 inferred"]
    assert list(time.values())[2:] == ["step time", 1, "5.0%", "5.0%", "5.0%", "1 predicted"]
    for line, quantity in ((simumax_memory, "peak memory"), (simumax_time, "step time")):
        assert (line["predicted by"], line["measured by, on"]) == ("SimuMax", "the same runs")
        assert (line["quantity"], line["numbers"]) == (quantity, 12)
    assert (simumax_time["mean"], simumax_time["worst"]) == ("5.3%", "11.4%")
    stated = [(line["predicted by"], line["quantity"], line["mean"], line["worst"]) for line in others]
    assert stated == [
        ("SimuMax", "peak memory", "0.46%", "1.4%"),
        ("SimuMax", "step time", "5.6%", "13.5%"),
        ("Phantora", "step time", "3% to 7%", ""),
        ("vTrain", "step time", "14.7%", ""),
    ]


def test_without_numbers_of_ours_a_line_says_so() -> None:
    line, *_ = validation_lines([record(f"{B200}:2:real_ms", "step_time_ms", None)])
    assert list(line.values())[2:] == ["step time", 0, "", "", "", "1 predicted"]


def test_what_simumax_says_of_the_same_rows_is_computed() -> None:
    others = published_file(PREDICTORS_FILE).rows
    memory, time = (predictor_errors(other) for other in others if other["file"] == B200)
    assert len(time) == len(memory) == 12
    # 828.76 ms for 843.0, 66.44 GiB for 66.55
    assert time[0] == pytest.approx(1 - 828.76 / 843.0)
    assert memory[0] == pytest.approx(1 - 66.44 / 66.55)


def test_every_file_of_measurements_has_its_source() -> None:
    files = {path.name for path in (ROOT / "results" / "measured").glob("megatron_*.csv")}
    assert files == {source.file for source in measured_sources()}
    readme = (ROOT / "results" / "measured" / "README.md").read_text()
    for source in measured_sources():
        assert source.commit in readme
        _, columns, rows = published_file(source.file)
        assert rows
        about = readme.partition(f"## {source.file}")[2].partition("\n## ")[0]
        assert [name for name in columns if name not in about] == []
    assert MEASURED in papers()
