"""Whole scenarios: pytest tests/benchmarks/test_sweeps.py --benchmark-only -s

As a user runs them, workers and their start included, without traces on disk and with them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.files import CACHE_FOLDER


def run(scenario: str, folder: Path) -> None:
    words = ["run", "--scenario", scenario, "--fresh", "--output", str(folder)]
    subprocess.run([sys.executable, "-m", "spbench", *words], check=True, capture_output=True)


@pytest.mark.parametrize("scenario", ["gate", "max_seqlen"])
@pytest.mark.parametrize("traces", ["none on disk", "on disk"])
def test_scenario(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, traces: str
) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache") if traces == "on disk" else "off")
    warm = int(traces == "on disk")
    benchmark.pedantic(run, (scenario, tmp_path / "rows"), rounds=1, warmup_rounds=warm)
    assert (tmp_path / "rows" / "cells.jsonl").exists()
