"""Workers that hang, die idle or cannot start: the row has what they said, nothing of them is left, and the
next cell runs. What keeps ranks from starting or meeting is told at once, with what to do."""

import errno
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from spbench.bench.command_line.cli import launched_exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.processes import starting
from spbench.bench.measure.processes.rank_agent import Launched
from spbench.bench.measure.processes.rank_pool import RankPool, loopback_store
from spbench.bench.measure.processes.starting import check_open_files, no_process
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import sweep, unfinished
from spbench.bench.measure.sweep.worker import Crew
from spbench.bench.row import FINAL, Row
from tests.bench import fails_to_import, fakes, slow_to_import
from tests.bench.fakes import cell
from tests.bench.hosts import left_of, needs_proc, until
from tests.grid import data, tabled
from tests.measure.processes.command_process import LIGHT_PATH

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
    with Crew() as crew, ResultsFile(tmp_path) as results:
        sweep([cell(2)], results, run=fakes.dying_later, crew=crew)
        (worker,) = crew.workers
        worker.process.join(10)
        assert not worker.alive
        assert sweep([cell(4)], results, run=fakes.dying_later, crew=crew)[0]["status"] == "ok"
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
    with Crew() as crew, ResultsFile(tmp_path) as results:
        sweep([cell(1)], results, run=fakes.answer, crew=crew)
        assert list((tmp_path / "temporary").iterdir())
    assert not list((tmp_path / "temporary").iterdir())


#: twelve workers have each had a cell when their parent is killed
PARENT = data(__file__)["PARENT"]


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
