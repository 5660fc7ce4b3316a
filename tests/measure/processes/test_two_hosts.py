"""A torchrun job on two hosts: what it measures and verifies is what one host does, and a host that vanishes
is a row."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.sweep.results import read_rows
from tests.bench import fakes
from tests.bench.hosts import Host, two_hosts
from tests.bench.processes import PATIENCE_S, left_of, until

LOOPBACK = "127.0.0.1"
SCENARIO = """
title: small steps on real ranks
defaults: {engine: distributed, model: bert-tiny, batch: 3, seq_len: 24, timing: {warmup: 0, samples: 2}}
groups:
  - {strategy: ring_self_attention, sizes: {sp: [2, 4, 6]}}
  - {strategy: tensor_parallel+ring_self_attention, sizes: {tp: 2, sp: 2}, mesh: [sp, tp]}
"""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


def started(
    hosts: tuple[Host, Host], folder: Path, name: str, arguments: list[str]
) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:  # the hosts may be this machine, so its system chooses the port
        free.bind((LOOPBACK, 0))
        place = f"{hosts[0].address}:{free.getsockname()[1]}"
    environment = {fakes.LOG: str(folder / "processes")}
    logs = [folder / f"{name}-{number}.log" for number in range(len(hosts))]
    return [host.torchrun(place, arguments, environment, log) for host, log in zip(hosts, logs, strict=True)]


@pytest.mark.slow
def test_two_hosts_measure_as_one(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(SCENARIO)
    run = ["spbench", "run", "--scenario", str(scenario), "--output", str(tmp_path / "out")]
    for process in started(hosts, tmp_path, "run", run):
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "run-0.log").read_text()
    assert "[4/4]" in (tmp_path / "run-0.log").read_text()
    assert "[4/4]" not in (tmp_path / "run-1.log").read_text()  # one process speaks, and writes
    rows, _ = read_rows(tmp_path / "out" / "cells.jsonl")
    assert len(rows) == 4
    for row in rows:
        cell = Cell.model_validate(row["cell"])
        if cell.sizes.world == 6:
            assert row["status"] == "unsupported"
            assert row["reason"] == "needs 6 ranks, and 4 were started; start more with torchrun"
            continue
        here = DistributedEngine().measure(cell).as_dict()
        assert (row["status"], row["reason"]) == ("ok", "")
        for name in ("communication", "formula", "formula_difference"):
            assert row["measurement"][name] == json.loads(json.dumps(here[name])), name


@pytest.mark.slow
def test_two_hosts_verify_as_one(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    verify = ["spbench", "verify", "--strategy", "ring_self_attention,megatron_sp+ulysses"]
    verify += ["--model", "bert-tiny,causal-transformer-tiny", "--world-size", "4", "--format", "json"]
    for process in started(hosts, tmp_path, "verify", verify):
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "verify-0.log").read_text()
    rows = rows_of(tmp_path / "verify-0.log")
    assert {row["status"] for row in rows} == {"green", "unsupported"}
    assert {row["mesh"] for row in rows if row["status"] == "green"} == {"sp4", "tp2xsp2"}


@pytest.mark.slow
def test_a_host_that_vanishes_is_a_row(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """And cells that need it no more run on what is left."""
    processes = started(hosts, tmp_path, "sweep", ["tests.bench.vanishing_sweep", str(tmp_path)])
    wait_for(tmp_path / "processes", 4)
    hosts[1].vanish()
    wait_for(tmp_path / "done", 1)
    rows, problems = read_rows(tmp_path / "cells.jsonl")
    assert problems == []
    assert [row["status"] for row in rows] == ["failed", "failed", "ok"]
    for row in rows[:2]:
        assert row["reason"].startswith("rank 2: no sign of life from its machine, ")
    hosts[0].clear()  # torchrun would wait five minutes for the other one at its end
    assert processes[0].returncode is not None
    hosts[1].clear()
    assert left_of(tmp_path / "processes") == []


@pytest.mark.slow
def test_the_host_of_the_rendezvous_vanishes(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The other host's ranks end and say why; only its torchrun waits for a connection that nobody closes."""
    torchruns = started(hosts, tmp_path, "sweep", ["tests.bench.vanishing_sweep", str(tmp_path)])
    wait_for(tmp_path / "processes", 4)
    hosts[0].vanish()
    log = tmp_path / "sweep-1.log"
    until(lambda: "process 0, which writes the results, is gone" in log.read_text(), "no word of it")
    until(lambda: set(hosts[1].pids()) <= {torchruns[1].pid}, "ranks are left on the other host")
    for host in hosts:
        host.clear()
    assert left_of(tmp_path / "processes") == []
    rows, problems = read_rows(tmp_path / "cells.jsonl")
    # a host that is cut off lives on and misses the other; one that died was running the first cell
    assert problems == []
    assert all("no sign of life from its machine" in row["reason"] for row in rows)


def wait_for(file: Path, lines: int) -> None:
    until(
        lambda: file.exists() and len(file.read_text().splitlines()) >= lines, f"not {lines} lines in {file}"
    )


def rows_of(log: Path) -> list[dict[str, Any]]:
    text = log.read_text()
    found: list[dict[str, Any]] = json.loads(text[text.index("[\n") : text.rindex("]") + 1])
    return found
