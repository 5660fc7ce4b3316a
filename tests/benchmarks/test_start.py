"""How long commands and processes take to start: pytest tests/benchmarks/test_start.py --benchmark-only

Wall-clock times, of which an idle machine is a condition. Rows of one group belong beside one another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.processes import starting as processes
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.sweep.worker import Worker
from spbench.bench.measurement import Measurement

ROOT = Path(__file__).parents[2]
#: whole command lines
HELP, LIST, DRY_RUN = "--help", "list", "run --scenario max_seqlen --dry-run"


def run_command(line: str, cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), CACHE_FOLDER: str(cache)}
    command = [sys.executable, "-m", "spbench", *line.split()]
    subprocess.run(command, env=environment, cwd=cache, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.benchmark(group="commands")
@pytest.mark.parametrize("line", [HELP, LIST, DRY_RUN])
def test_a_command(benchmark: Any, tmp_path: Path, line: str) -> None:
    benchmark.pedantic(run_command, (line, tmp_path), rounds=5, warmup_rounds=1)


def nothing(cell: Cell) -> Measurement:
    return Measurement()


def run_in_a_new_worker() -> None:
    worker = Worker()
    worker.give(Cell(model="bert-tiny", strategy="single", batch=1, seq_len=8), nothing)
    while worker.outcome(1.0) is None:
        pass
    worker.stop()
    worker.end()


def rank(mesh: Any) -> int:
    return mesh.get_rank()


def run_in_a_new_pool(ranks: int) -> None:
    with RankPool(ranks) as pool:
        assert pool.run({"sp": ranks}, rank) == list(range(ranks))


@pytest.mark.benchmark(group="processes")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker(benchmark: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A worker that takes a cell and is ended; forked from the server, or importing torch itself."""
    monkeypatch.setattr(processes, "START_METHOD", method)
    benchmark.pedantic(run_in_a_new_worker, rounds=3, warmup_rounds=1)


@pytest.mark.benchmark(group="processes")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_ranks(benchmark: Any, monkeypatch: pytest.MonkeyPatch, method: str, ranks: int) -> None:
    """Real ranks that make a process group, answer and are ended."""
    monkeypatch.setattr(processes, "START_METHOD", method)
    benchmark.pedantic(run_in_a_new_pool, (ranks,), rounds=3, warmup_rounds=1)
