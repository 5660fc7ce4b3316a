"""Faults of real ranks: each is a row that says what happened, the sweep goes on, and no process is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.sweep.results import ResultsFile, read_rows
from spbench.bench.measure.sweep.sweep import sweep, unfinished
from spbench.bench.row import Row
from tests.bench import fakes
from tests.bench.fakes import cell
from tests.bench.hosts import PATIENCE_S, left_of, needs_proc, until

#: of the cell that hangs; the others end by themselves
LIMIT_S = 2.0
PROGRAM = "tests.bench.faulty_sweep"
KILLED = "rank 1: the process was killed by SIGKILL (was the machine out of memory?)"


def cells(*faults: str) -> list[Cell]:
    """One cell for each of these faults; for all, and one without, if none is named."""
    return [
        cell(2, "distributed", variant=fault, timeout_s=LIMIT_S if fault == "hangs" else None)
        for fault in faults or ("killed", "hangs", "raises", "out of memory", "")
    ]


def check(rows: list[Row]) -> None:
    """What each fault must have become."""
    found = {row["cell"]["variant"]: row for row in rows}
    assert {fault: row["status"] for fault, row in found.items()} == {
        "killed": "failed",
        "hangs": "timeout",
        "raises": "failed",
        "out of memory": "oom",
        "": "ok",
    }
    reasons = {fault: row["reason"] for fault, row in found.items()}
    assert reasons["killed"] == KILLED
    assert reasons["raises"] == "rank 1: ArithmeticError: planted in rank 1"
    assert "in _raises" in found["raises"]["traceback"]
    assert "can't allocate memory: you tried to allocate 4294967296 bytes" in reasons["out of memory"]
    assert reasons["out of memory"].startswith("rank 1: ")
    limit = f"no end within its limit of {LIMIT_S:g} s, no answer from ranks 0, 1"
    assert reasons["hangs"] == limit
    log = found["hangs"]["log"]
    assert "in waits_for_ever" in log.split("-- stacks of rank 1 --")[1]
    assert "in all_reduce" in log.split("-- stacks of rank 0 --")[1].split("-- stacks of rank 1 --")[0]
    first, second = log.split("-- last collectives of rank ")[1:]
    assert "gloo:all_reduce [[2]] on 0 default_pg: scheduled" in first.split("-- stacks")[0]
    assert "[[2]]" not in second.split("-- stacks")[0]  # rank 1 never came to it


@needs_proc
def test_faults_of_ranks_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "processes"
    monkeypatch.setenv(fakes.LOG, str(log))
    with ResultsFile(tmp_path) as results:
        rows = sweep(cells(), results, run=fakes.faulty)
        assert [cell.variant for cell in unfinished(cells(), results)] == ["killed", "hangs", "raises"]
    check(rows)
    assert len(log.read_text().split()) == 2 * len(rows)
    assert left_of(log) == []


LAUNCHERS = {
    "command": ["-m", PROGRAM],
    "torchrun": [
        *("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", PROGRAM),
    ],
}


def started(launcher: str, folder: Path, *faults: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        fakes.LOG: str(folder / "processes"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, *LAUNCHERS[launcher], str(folder), *faults]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@needs_proc
@pytest.mark.slow
def test_the_same_under_torchrun(tmp_path: Path) -> None:
    """The launcher sees nothing of what becomes of the ranks, and ends well."""
    launcher = started("torchrun", tmp_path)
    _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, said
    rows, problems = read_rows(tmp_path / "cells.jsonl")
    assert problems == []
    assert left_of(tmp_path / "processes") == []
    check(rows)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launcher_is_killed(launcher: str, tmp_path: Path) -> None:
    """All that it has started ends, and what it had measured is there."""
    process, log = started(launcher, tmp_path, "", "hangs too"), tmp_path / "processes"
    until(lambda: log.exists() and len(log.read_text().split()) == 4, "the second cell does not begin")
    process.kill()
    process.wait(10)
    until(lambda: left_of(log) == [], "ranks are left")
    rows, problems = read_rows(tmp_path / "cells.jsonl")
    assert problems == []
    assert rows[0]["status"] == "ok"
    for row in rows[1:]:  # its worker found out first
        assert (row["status"], row["reason"]) == (
            "failed",
            "rank 0: the launcher that holds the ranks' store is gone",
        )
    process.stderr.read()  # ends when nobody is left who could write
