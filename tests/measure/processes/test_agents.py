"""Agents as torchrun would start them, in processes of this machine: jobs, faults, and their end. A torchrun
job on two hosts: what it measures and verifies is what one host does, and a host that vanishes is a row."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.processes import rank_agent, stacks, torchrun
from spbench.bench.measure.processes.child import Child
from spbench.bench.measure.processes.rank_agent import BEAT_S, Launched, serve
from spbench.bench.measure.processes.rank_pool import Rendezvous
from spbench.bench.measure.processes.stacks import AGENTS, RankError
from spbench.bench.measure.processes.torchrun import check_gpus, coordinating, ranks_for, shared_backend
from spbench.bench.measure.sweep.results import read_rows
from spbench.impls import loose_files
from spbench.impls.layout import Unavailable
from spbench.impls.registries import strategy_class
from tests.bench import fakes
from tests.bench.hosts import PATIENCE_S, Host, left_of, needs_proc, two_hosts, until
from tests.grid import data
from tests.measure.processes.test_rank_pool import (
    dies_on_rank_1,
    listening_addresses,
    never_answers,
    process_id,
    sum_of_ranks,
)
from tests.plugins.additions import EXAMPLES


def be_agent(connection: Connection, launched: Launched) -> None:
    serve(launched)


@pytest.fixture(scope="module")
def agent() -> Iterator[BaseProcess]:
    """The second of two agents; this process coordinates them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = Rendezvous("127.0.0.1", free.getsockname()[1])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torchrun, "when_parent_is_gone", lambda act: None)  # its thread would stay
        patched.setattr(torchrun, "LOST_S", 5 * BEAT_S)  # also where a busy machine delays a beat
        patched.setattr(stacks, "GRACE_S", 0.5)  # of the other rank, when one is lost
        with coordinating(Launched(0, 0, 2, place)):
            agent = Child(be_agent, Launched(1, 1, 2, place))
            yield agent.process
    agent.process.join()
    assert AGENTS not in os.environ


def test_jobs_and_faults(agent: BaseProcess) -> None:
    """After each fault the next job runs."""
    with ranks_for(2) as ranks:
        assert ranks.run({"sp": 2}, sum_of_ranks, "sp", 5) == [(0, 11, [2]), (1, 11, [2])]
        with pytest.raises(RankError, match="rank 1: the process was killed by SIGKILL"):
            ranks.run({"sp": 2}, dies_on_rank_1)
        ranks.run({"sp": 2}, process_id)  # so that the next job's second is not spent on a start
        with pytest.raises(RankError, match="no answer from ranks 0, 1") as raised:
            ranks.run({"sp": 2}, never_answers, timeout_s=1.0)
        assert "in never_answers" in raised.value.log.split("-- stacks of rank 1 --")[1]
        assert ranks.run({}, sum_of_ranks, "sp", 5) == [(0, 5, [])]
        first, second = ranks.run({"sp": 2}, process_id), ranks.run({"sp": 2}, process_id)
        assert first == second
    with ranks_for(2, fresh=True) as ranks:
        third, fourth = ranks.run({"sp": 2}, process_id), ranks.run({"sp": 2}, process_id)
    assert not {*first} & {*third}
    assert not {*third} & {*fourth}


def module_of(mesh: DeviceMesh, strategy: str) -> str:
    return strategy_class(strategy).__module__


def test_files_that_were_added_after_the_agents_had_started(agent: BaseProcess, tmp_path: Path) -> None:
    text = (EXAMPLES / "gathered_attention.py").read_text()
    (tmp_path / "late.py").write_text(text.replace("gathered_attention", "late"))
    loose_files.add_file(tmp_path / "late.py")
    with ranks_for(2) as ranks:
        assert ranks.run({"sp": 2}, module_of, "late") == ["spbench.impls.loose_files.late"] * 2


@needs_proc
def test_agents_of_this_machine_meet_on_loopback(agent: BaseProcess) -> None:
    with ranks_for(2) as ranks:
        port = ranks._store.underlying_store.port  # type: ignore[attr-defined]
    assert listening_addresses(port) == [f"0100007F:{port:04X}"]


def test_there_are_too_few(agent: BaseProcess) -> None:
    with pytest.raises(Unavailable, match="needs 3 ranks, and 2 were started; start more with torchrun"):
        ranks_for(3)


def test_an_agent_that_stands_still_is_lost(agent: BaseProcess) -> None:
    assert agent.pid is not None
    with ranks_for(2) as ranks:
        ranks.run({"sp": 2}, sum_of_ranks, "sp", 5)  # one that has not begun is waited for
        os.kill(agent.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RankError, match="rank 1: no sign of life from its machine, "):
                ranks.run({"sp": 2}, sum_of_ranks, "sp", 5)
        finally:
            os.kill(agent.pid, signal.SIGCONT)


def test_gpus_are_counted_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENTS, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpus(2, "cuda")
    check_gpus(3, "cpu")
    with pytest.raises(Unavailable, match="needs 3 GPUs, and this machine has 2; start it with torchrun"):
        check_gpus(3, "cuda")
    assert [shared_backend(ranks, "cuda") for ranks in (2, 3)] == ["", "spbench_staged"]
    monkeypatch.setenv(AGENTS, "some")
    check_gpus(3, "cuda")


@pytest.mark.parametrize("leaving", [False, True])
def test_an_agent_without_a_store_ends_unless_it_is_leaving(
    monkeypatch: pytest.MonkeyPatch, leaving: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(rank_agent, "_leave", lambda launched, why: said.append(why))
    agent = SimpleNamespace(leaving=leaving, launched=None)
    rank_agent._Agent._lost(cast(Any, agent), "no answer")
    assert [why.endswith("where they end (no answer)") for why in said] == ([] if leaving else [True])


LOOPBACK = "127.0.0.1"
SCENARIO = data(__file__)["SCENARIO"]


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
