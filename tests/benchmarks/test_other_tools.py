"""Beside tools that answer without a GPU too: pytest tests/benchmarks/test_other_tools.py --benchmark-only

Each is a new process, from its start to its answer, and says another amount: Calculon's is a formula's
estimate of time and memory; tinygrad compiles the kernels of the step for a device that runs nothing; ours is
the peak, the closed forms held to the traced bytes, and the simulated time. A tool that is not there is
skipped: `pip install tinygrad`; SPBENCH_CALCULON names a checkout of Calculon,
which needs psutil.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TINYGRAD_STEP = Path(__file__).with_name("tinygrad_step.py")
CALCULON = os.environ.get("SPBENCH_CALCULON")
OURS = """
from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.sweep.worker import run_cell
sizes = Sizes(**{sizes})
found = run_cell(Cell(model="bert-base", strategy="{strategy}", sizes=sizes, batch=16, seq_len=512,
                 precision="fp32", cluster="dgx-a100"))
assert found.status == "ok" and found.step_time_s
"""


def python(*arguments: str, **environment: str) -> None:
    subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, check=True, capture_output=True
    )


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("single", {}), ("ring_self_attention", {"sp": 64})],
    ids=["1 device", "64 devices"],
)
def test_spbench(benchmark: Any, strategy: str, sizes: dict[str, int]) -> None:
    """BERT-Base, 16 sequences of 512."""
    script = OURS.format(strategy=strategy, sizes=sizes)
    benchmark.pedantic(python, ("-c", script), rounds=3, warmup_rounds=1)


@pytest.mark.skipif(importlib.util.find_spec("tinygrad") is None, reason="tinygrad is not installed")
def test_tinygrad(benchmark: Any) -> None:
    """The same step on one device; its cache of compiled kernels is left out."""
    environment = {"DEV": "NULL", "CACHELEVEL": "0"}
    benchmark.pedantic(python, (str(TINYGRAD_STEP),), environment, rounds=3, warmup_rounds=1)


@pytest.mark.skipif(CALCULON is None, reason="SPBENCH_CALCULON names no checkout")
def test_calculon(benchmark: Any) -> None:
    """Its own example: GPT-3 175B on 3,072 A100."""
    folder = Path(CALCULON or "")
    example = folder / "examples" / "3072_t4_p64_d12_mbs4_full.json"
    files = [folder / "models" / "gpt3-175B.json", example, folder / "systems" / "a100_80g.json"]
    command = (str(folder / "bin" / "calculon"), "llm", *map(str, files), "-")
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    benchmark.pedantic(python, command, {"PYTHONPATH": path}, rounds=3, warmup_rounds=1)
