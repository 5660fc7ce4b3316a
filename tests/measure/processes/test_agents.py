"""Agents as torchrun would start them, in processes of this machine: jobs, faults, and their end. A torchrun
job on two hosts: what it measures and verifies is what one host does, and a host that vanishes is a row.

Workers that hang, die idle or cannot start: the row has what they said, nothing of them is left, and the
next cell runs. What keeps ranks from starting or meeting is told at once, with what to do.
"""

import errno
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
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
from spbench.bench.command_line.cli import launched_exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.processes import rank_agent, stacks, starting, torchrun
from spbench.bench.measure.processes.child import Child
from spbench.bench.measure.processes.rank_agent import BEAT_S, Launched, serve
from spbench.bench.measure.processes.rank_pool import RankPool, Rendezvous, loopback_store
from spbench.bench.measure.processes.stacks import AGENTS, RankError
from spbench.bench.measure.processes.starting import check_open_files, no_process
from spbench.bench.measure.processes.torchrun import check_gpus, coordinating, ranks_for, shared_backend
from spbench.bench.measure.sweep.results import ResultsFile, read_rows
from spbench.bench.measure.sweep.sweep import sweep, unfinished
from spbench.bench.measure.sweep.worker import Crew
from spbench.bench.row import FINAL, Row
from spbench.impls import loose_files
from spbench.impls.layout import Unavailable
from spbench.impls.registries import strategy_class
from tests.bench import fails_to_import, fakes, slow_to_import
from tests.bench.fakes import cell
from tests.bench.hosts import PATIENCE_S, Host, left_of, needs_proc, two_hosts, until
from tests.grid import tabled
from tests.measure.processes.command_process import LIGHT_PATH
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


#: of the cells that hang; the others may take as long as they do
LIMIT_S = 2.0


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the stand-ins write their processes."""
    monkeypatch.setenv(fakes.LOG, str(tmp_path / "processes"))
    return tmp_path / "processes"


@needs_proc
def test_a_cell_that_hangs_in_python(tmp_path: Path, processes: Path) -> None:
    cells = [cell(4), cell(2, timeout_s=LIMIT_S), cell(1)]
    with ResultsFile(tmp_path) as results:
        rows = sweep(cells, results, run=fakes.hanging, jobs=1)
        assert [row["status"] for row in rows] == ["ok", "timeout", "ok"]
        check_timed_out(rows[1])
        assert "in waits_for_ever" in rows[1]["log"].split("-- stacks of the worker --")[1]
        assert unfinished(cells, results) == [cells[1]]
        # with another limit it is the same cell
        assert cells[1].model_copy(update={"timeout_s": 60.0}).key == rows[1]["key"]
    pids = processes.read_text().split()
    assert pids[0] == pids[1] != pids[2]  # the worker that hung was replaced
    assert left_of(processes) == []


def check_timed_out(row: Row) -> None:
    assert row["reason"] == f"no end within its limit of {LIMIT_S:g} s"
    assert row["elapsed_s"] == LIMIT_S
    assert row["log"].startswith("last words\n")
    assert "timeout_s" not in row["cell"]
    assert "timeout" not in FINAL


def test_a_limit_counts_from_when_a_cell_begins(tmp_path: Path) -> None:
    """A worker may take seconds to import what it runs, which the first cell does not pay for."""
    start = time.perf_counter()
    with ResultsFile(tmp_path) as results:
        rows = sweep([cell(1, timeout_s=slow_to_import.IMPORT_S / 2)], results, run=slow_to_import.run)
    assert rows[0]["status"] == "ok"
    assert time.perf_counter() - start > slow_to_import.IMPORT_S


def test_a_worker_that_died_idle_is_replaced(tmp_path: Path, processes: Path) -> None:
    with Crew(fakes.dying_later) as crew, ResultsFile(tmp_path) as results:
        sweep([cell(2)], results, crew=crew)
        (worker,) = crew.workers
        worker.process.join(10)
        assert not worker.alive
        assert sweep([cell(4)], results, crew=crew)[0]["status"] == "ok"
    assert len(set(processes.read_text().split())) == 2


def test_what_a_worker_printed_last_is_in_its_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ResultsFile(tmp_path) as results:
        (row,) = sweep([cell(1)], results, run=fakes.ending_with_words)
    assert row["status"] == "failed"
    assert row["reason"] == (
        "the worker process ended by itself with exit code 1; it printed last: cannot open the heart of gold"
    )
    assert row["log"].endswith("many words\n\ncannot open the heart of gold\n")
    assert len(row["log"]) < 10_000
    assert "cannot open the heart of gold" in capfd.readouterr().err


def test_a_worker_that_cannot_import_what_it_runs(tmp_path: Path) -> None:
    with ResultsFile(tmp_path) as results:
        (row,) = sweep([cell(1)], results, run=fails_to_import.run)
    assert row["reason"].endswith("exit code 1; it printed last: ImportError: no such luck")
    assert "Traceback" in row["log"]


def test_no_file_of_a_worker_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with Crew(fakes.answer) as crew, ResultsFile(tmp_path) as results:
        sweep([cell(1)], results, crew=crew)
        assert list((tmp_path / "temporary").iterdir())
    assert not list((tmp_path / "temporary").iterdir())


#: twelve workers have each had a cell when their parent is killed
PARENT = """
import os, signal
from spbench.bench.cell import Cell
from spbench.bench.measure.sweep.worker import Crew
from tests.bench import fakes
crew = Crew(fakes.answer)
for _ in range(12):
    crew.idle(12).give(Cell(model="bert-tiny", strategy="ring_self_attention", batch=2, seq_len=8), crew.run)
while crew.busy:
    crew.ended()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_file_of_a_worker_is_left_by_a_parent_that_is_killed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="spbench-test-") as temporary:  # names of sockets may not be long
        environment = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": LIGHT_PATH}
        assert subprocess.run([sys.executable, "-c", PARENT], env=environment).returncode == -signal.SIGKILL
        until(lambda: not [*Path(temporary).glob("spbench-worker-*")])


LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}


@tabled(__file__, "variables_that_no_launcher_sets")
def test_variables_that_no_launcher_sets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, said: str
) -> None:
    for each, text in (LAUNCHED | {name: value}).items():
        monkeypatch.setenv(each, text)
    assert launched_exit_code(["list", "engines"]) == 2
    error = capsys.readouterr().err
    assert f"but for {said}; start the command with torchrun, or unset RANK" in error
    assert error.count("\n") == 1
    monkeypatch.setenv(name, LAUNCHED[name])
    assert Launched.here().agents == 2


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "limits_of_process", lambda: {resource.RLIMIT_NOFILE: (20, 20)})
    with pytest.raises(
        UserError, match=r"may open 20 files, and needs at least \d+ to start 40 ranks; raise"
    ):
        RankPool(40)
    monkeypatch.setattr(os, "listdir", lambda folder: ["0", "1", "2"])
    check_open_files(17, "to start")  # as many as it may
    with pytest.raises(UserError, match="needs at least 21 to start"):
        check_open_files(18, "to start")
    monkeypatch.undo()
    check_open_files(1, "to start")


def test_no_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(UserError, match=r"cannot meet at 127.0.0.1:\d+ \(Network is unreach"):
        loopback_store()
    outcome = measure(lambda _: RankPool(1), cell(1))  # type: ignore[arg-type, return-value]
    assert (outcome.status, outcome.traceback) == ("failed", "")
    assert outcome.reason.startswith("ranks cannot meet at 127.0.0.1:")


def test_a_server_that_was_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGKILL)"])
    said = no_process(EOFError(), child.pid)
    assert said.startswith("the process that forks ranks and workers was killed by SIGKILL")
    assert "run the same command again" in said
    assert child.wait() == -9  # found as it was
    assert "is gone (EOFError); run the same command again" in no_process(EOFError(), None)
    full = OSError(errno.EMFILE, "Too many open files")
    assert "look at the limit of open files (ulimit -n)" in no_process(full, None)


def test_a_daemon_may_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker below a Dask worker, to which multiprocessing forbids children."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    starting.starting_context()
    assert not multiprocessing.current_process().daemon
