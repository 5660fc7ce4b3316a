"""What the engine itself costs: pytest tests/benchmarks --benchmark-only. Compare within one run: the column
of ratios that pytest-benchmark prints beside each time. Beside torch's own MemTracker: pytest
tests/benchmarks/test_engine_cost.py --benchmark-only. The column of ratios says how long both take for the
peak of one rank of the same step, on fake tensors. Whole scenarios: pytest
tests/benchmarks/test_engine_cost.py --benchmark-only -s. As a user runs them, workers and their start
included, without traces on disk and with them. How long commands and processes take to start: pytest
tests/benchmarks/test_engine_cost.py --benchmark-only. Wall-clock times, of which an idle machine is a
condition. Rows of one group belong beside one another."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell, Sizes
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.memory.allocator import replay
from spbench.bench.measure.processes import starting as processes
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.sweep.worker import Worker
from spbench.bench.measurement import Measurement
from tests.measure.engines.test_peaks import tracked_peak


def cell(ranks: int) -> Cell:
    return Cell(
        model="bert-base",
        strategy="ring_self_attention",
        sizes=Sizes(sp=ranks),
        batch=8,
        seq_len=1024,
        precision="fp16",
        cluster="piz-daint-p100",
        model_options={"layers": 4},
    )


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("events", [False, True], ids=["memory", "memory and time"])
@pytest.mark.parametrize("path", ["remembered", "plain"])
def test_trace(benchmark: Any, monkeypatch: pytest.MonkeyPatch, path: str, events: bool, ranks: int) -> None:
    """A trace in a process that has traced such a cell before, with operators remembered and without."""
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1" if path == "plain" else "")
    trace = benchmark.pedantic(tracing.trace, (cell(ranks),), {"events": events}, rounds=3, warmup_rounds=1)
    assert trace.memory.peak().nbytes > 0


def test_replay_of_the_allocator(benchmark: Any) -> None:
    log = tracing.trace(cell(64)).memory
    assert benchmark(replay, log.sizes, log.events, None).out_of_memory is None


def peak(asked: Cell) -> int:
    return tracing.trace(asked).memory.peak().nbytes


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("tool", [peak, tracked_peak], ids=["spbench", "MemTracker"])
def test_peak(benchmark: Any, tool: Callable[[Cell], int], ranks: int) -> None:
    found = benchmark.pedantic(tool, (cell(ranks),), rounds=3, warmup_rounds=1)
    benchmark.extra_info["peak_bytes"] = found
    assert found == pytest.approx(peak(cell(ranks)), rel=1e-3)  # ours in granules of 512 bytes


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
