"""What keeps ranks from starting or meeting is told at once, with what to do."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import socket
import subprocess
import sys

import pytest

from spbench.bench.command_line.cli import launched_exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.processes import starting
from spbench.bench.measure.processes.rank_agent import Launched
from spbench.bench.measure.processes.rank_pool import RankPool, loopback_store
from spbench.bench.measure.processes.starting import check_open_files, no_process
from tests.bench.fakes import cell

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "x", "WORLD_SIZE='x'"),
        ("MASTER_PORT", "p", "MASTER_PORT='p'"),
        ("MASTER_PORT", "70000", "MASTER_PORT='70000'"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK='-1'"),
        ("RANK", "2", "RANK=2 of WORLD_SIZE=2"),
    ],
)
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
