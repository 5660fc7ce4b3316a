"""Numbers in the prose of docs/gpu.md and docs/import.md are those of committed files and of arithmetic."""

import csv
import re
from pathlib import Path

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import model_parameters

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "results" / "gpu" / "2026-11-26-nvidia-h200"


def numbers(page: str, sentence: str) -> list[float]:
    (found,) = re.finditer(sentence, (ROOT / "docs" / page).read_text())
    return [float(each.replace(",", "")) for each in found.groups()]


def rows(name: str) -> list[dict[str, str]]:
    return [*csv.DictReader((CHECK / name).open(newline=""))]


def test_what_one_h200_has_shown() -> None:
    verdicts = [row["status"] for row in rows("verify.csv")]
    counted = [verdicts.count("green"), verdicts.count("red")]
    assert numbers("gpu.md", r"(\d+) cases green, (\d+) red") == counted
    right = [row["ok"] for row in rows("linear_attention_nvidia-h200_errors.csv")]
    assert numbers("gpu.md", r"(\d+) results right") == [right.count("True")] == [len(right)]
    timed = [row for row in rows("linear_attention_nvidia-h200.csv") if int(row["length"]) >= 32 * 1024]
    for beside, sentence in (
        ("plain", r"(\d+) to (\d+) times faster"),
        ("roofline", r"(\d+) to (\d+) times the"),
    ):
        ratios = sorted(float(row[f"{beside}_ms"]) / float(row["triton_ms"]) for row in timed)
        ratios = [round(each if beside == "plain" else 1 / each) for each in ratios]
        assert numbers("gpu.md", sentence) == [min(ratios), max(ratios)]


def test_an_8b_on_8_ranks_by_hand() -> None:
    """Weights in float32 and two moments of a rank, and the logits of a micro-batch, twice of 2 bytes."""
    *said, length, vocabulary = numbers(
        "import.md",
        r"has (\S+) GiB of float32 weights, (\S+) of moments and (\S+) of logits \((\S+) x (\S+), twice\)",
    )
    cell = Cell(model="Qwen/Qwen3-8B", strategy="single", sizes={"dp": 8}, batch=8, seq_len=int(length))
    weights = 4 * model_parameters(cell) / 8
    assert said == pytest.approx(
        [n / 2**30 for n in (weights, 2 * weights, 4 * length * vocabulary)], abs=0.005
    )
