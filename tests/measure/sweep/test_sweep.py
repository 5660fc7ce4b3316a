"""Sweeps: failures are rows, deaths cost one cell, and what has ended is kept through any interruption.
Result files: nothing is lost to a crash, a full disk or a spoilt line, and every fault is one line.
Faults of real ranks: each is a row that says what happened, the sweep goes on, and no process is left."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from spbench.bench.cell import Cell, Learning, Sizes
from spbench.bench.command_line.record_forms import as_frame
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.sweep.results import RESULTS_FILE, ResultsFile, read_rows
from spbench.bench.measure.sweep.sweep import _relative_cost, as_row, sweep, unfinished
from spbench.bench.measure.sweep.worker import Crew
from spbench.bench.measurement import Outcome
from spbench.bench.row import Row
from tests.bench import fakes
from tests.bench.fakes import answer, cell
from tests.bench.hosts import PATIENCE_S, left_of, needs_proc, until
from tests.measure.processes.command_process import Command


def test_failures_and_deaths_are_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cells = [cell(world) for world in (1, 2, 3, 4, 5)]
    begun, ended = [], []
    with ResultsFile(tmp_path) as results:
        rows = sweep(
            cells,
            results,
            run=fakes.moody,
            jobs=2,
            on_start=lambda c: begun.append(c.sizes.world),
            on_end=lambda r: ended.append(r["key"]),
        )
        assert [row["key"] for row in rows] == [c.key for c in cells]
        assert [row["status"] for row in rows] == ["ok", "failed", "unsupported", "ok", "failed"]
        assert rows[1]["reason"].startswith("the worker process was killed by SIGKILL")
        assert rows[2]["reason"] == "3 ranks do not divide; use 2 or 4"
        assert rows[4]["reason"] == "ValueError: five is a fault"
        assert begun == [5, 4, 3, 2, 1]  # the longest first
        assert set(ended) == set(results.rows) == {c.key for c in cells}
        assert read_rows(results.path)[0] == [results.rows[key] for key in ended]
        # only what failed is run again
        assert unfinished(cells, results) == [cells[1], cells[4]]
    assert capfd.readouterr().out == ""  # what engines print is not among the results


def test_pipelines_of_many_micro_batches_begin_first() -> None:
    """As many as are traced count: further ones take no longer."""
    sizes = cell(1).sizes.model_copy(update={"pp": 4})
    training = cell(1).training.model_copy(update={"schedule": "interleaved", "virtual_stages": 2})

    def cost(micro_batches: int) -> int:
        changed = training.model_copy(update={"micro_batches": micro_batches})
        return _relative_cost(cell(1).model_copy(update={"sizes": sizes, "training": changed}))

    assert cost(1) < cost(8) < cost(64) == cost(512)


def test_nothing_to_do_starts_no_process(tmp_path: Path) -> None:
    with ResultsFile(tmp_path) as results:
        results.append(as_row(cell(1), Outcome("oom")))

        def never(c: Cell) -> None:
            raise AssertionError

        assert len(sweep([cell(1)], results, on_start=never)) == 1
        assert sweep([], results) == []


def test_cells_that_start_processes_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv(fakes.LOG, str(log))
    cells = [cell(1), cell(2, "distributed"), cell(4, "distributed")]
    with ResultsFile(tmp_path) as results:
        sweep(cells, results, run=fakes.logged, jobs=3)
    assert log.read_text().split("\n") == ["begin 1", "end 1", "begin 4", "end 4", "begin 2", "end 2", ""]


def test_training_runs_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses are the same at any speed. Two of them meet; a measurement comes after them, alone."""
    monkeypatch.setenv(fakes.LOG, str(tmp_path / "log"))
    asked = Learning(steps=1)
    runs = [cell(2, "distributed").model_copy(update={"learning": asked, "batch": b}) for b in (2, 4)]
    with ResultsFile(tmp_path) as results:
        rows = sweep([cell(1, "distributed"), *runs], results, run=fakes.meeting, jobs=2)
    assert [row["status"] for row in rows] == ["ok", "ok", "ok"], [row["reason"] for row in rows]
    assert (tmp_path / "log").read_text().splitlines() == ["begin 2", "begin 2", "begin 1"]


def test_a_crew_stays_from_sweep_to_sweep(tmp_path: Path) -> None:
    with Crew() as crew, ResultsFile(tmp_path) as results:
        sweep([cell(1)], results, run=fakes.answer, crew=crew, jobs=2)
        (worker,) = crew.workers
        rows = sweep([cell(2), cell(4)], results, run=fakes.answer, crew=crew, jobs=1)
        assert [row["status"] for row in rows] == ["ok", "ok"]
        assert crew.workers == [worker]
        crew.dismiss()
        assert not worker.folder.exists()
        sweep([cell(2), cell(3)], results, run=fakes.moody, crew=crew, jobs=1)
        assert [results.rows[cell(world).key]["status"] for world in (2, 3)] == ["ok", "unsupported"]
        (worker,) = crew.workers
    assert not worker.folder.exists()


def test_full_disk_ends_the_sweep_and_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ResultsFile(tmp_path) as results:
        ended: list[str] = []

        def append(row: dict[str, object]) -> None:
            if ended:
                raise UserError("cannot write: no space left")
            ResultsFile.append(results, row)

        monkeypatch.setattr(results, "append", append)
        with pytest.raises(UserError, match="no space left"):
            sweep(
                [cell(4), cell(1)], results, run=fakes.answer, jobs=1, on_end=lambda r: ended.append(r["key"])
            )
        monkeypatch.undo()
        assert unfinished([cell(4), cell(1)], results) == [cell(1)]


# -- real interruptions of a real command ----------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.end()


def check_that_it_goes_on(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted sweep has lost only the running cells, and the same command runs the others."""
    kept = read_rows(command.results)[0]
    assert sorted(row["measurement"]["answer"] for row in kept) == [4000, 8000]
    with command.results.open("ab") as file:  # as if it had been killed inside a write
        file.write(b'{"key":"half a r')

    command.gate.touch()
    again = command.again(monkeypatch)
    assert again.exit_code == 0, again.output
    assert "5 cells, 2 of them kept from before; running 3" in again.stderr
    assert f"{command.results}:3: not a result row, skipped" in again.stderr
    rows, problems = read_rows(command.results)
    assert [row["status"] for row in rows] == ["ok"] * 5
    assert problems == []
    runs = [key for _, key in command.begun()]
    assert all(runs.count(row["key"]) == 1 for row in kept)
    assert "rsa-max-seqlen-base" in again.stdout


@pytest.mark.slow
@needs_proc
def test_killed_sweep_loses_only_running_cells_and_resumes(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = command.start()
    command.until_two_are_held_up()
    process.kill()
    process.communicate()
    command.until_processes_are_gone()
    check_that_it_goes_on(command, monkeypatch)


@needs_proc
def test_ctrl_c_says_how_to_go_on_and_it_does(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    process = command.start()
    command.until_two_are_held_up()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == (
        f"spbench: interrupted; 2 of 5 cells are in {command.results}, the same command goes on"
    )
    assert "Traceback" not in err
    command.until_processes_are_gone()
    check_that_it_goes_on(command, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs limits of another process")
def test_a_disk_that_is_full_within_a_row(command: Command) -> None:
    """What was written of the row is cut off again, the processes end, and once there is room it goes on."""
    process = command.start()
    command.until_two_are_held_up()
    kept = command.results.read_bytes()
    limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (len(kept) + 100, limits[1]))
    command.gate.touch()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"spbench: cannot write to {command.results}: ")
    assert command.results.read_bytes() == kept
    command.until_processes_are_gone()

    command.start().communicate(timeout=PATIENCE_S)
    rows, problems = read_rows(command.results)
    assert [row["status"] for row in rows] == ["ok"] * 5
    assert command.results.read_bytes().startswith(kept)
    assert problems == []


def row(world: int = 1, **outcome: Any) -> Row:
    cell = Cell(model="bert-tiny", strategy="ring_self_attention", sizes=Sizes(sp=world), batch=2, seq_len=8)
    return as_row(cell, Outcome(**outcome) if outcome else measure(answer, cell))


def stored(folder: Path) -> list[int]:
    """World sizes of the rows in a folder's file."""
    return [entry["cell"]["sizes"]["sp"] for entry in read_rows(folder / RESULTS_FILE)[0]]


def test_rows_go_round(tmp_path: Path) -> None:
    rows = [row(1), row(4), row(5)]
    with ResultsFile(tmp_path / "new" / "folder") as results:
        for entry in rows:
            results.append(entry)
    loaded, problems = read_rows(results.path)
    assert loaded == rows
    assert problems == []
    assert [entry["status"] for entry in loaded] == ["ok", "ok", "failed"]
    assert loaded[0]["provenance"]["torch"]
    assert loaded[2]["reason"] == "ValueError: five is a fault"
    assert "Traceback" in loaded[2]["traceback"]


def test_last_row_of_a_key_wins(tmp_path: Path) -> None:
    with ResultsFile(tmp_path) as results:
        results.append(row(1, status="failed", reason="first"))
        results.append(row(4))
        results.append(row(1, status="ok"))
    loaded, _ = read_rows(results.path)
    assert [entry["status"] for entry in loaded] == ["ok", "ok"]
    assert results.rows == {entry["key"]: entry for entry in loaded}


def test_what_json_cannot_say_becomes_null(tmp_path: Path) -> None:
    with ResultsFile(tmp_path) as results:
        results.append(
            row(1, status="numerics", measurement={"step_time_s": float("nan"), "x": [float("inf")]})
        )
    text = results.path.read_text()
    assert json.loads(text)["measurement"] == {"step_time_s": None, "x": [None]}


def test_truncated_last_line_is_skipped_and_the_next_row_starts_afresh(tmp_path: Path) -> None:
    with ResultsFile(tmp_path) as results:
        for world in (1, 2, 4):
            results.append(row(world))
    whole = results.path.read_bytes()
    results.path.write_bytes(whole[:-40])
    with ResultsFile(tmp_path) as results:
        assert len(results.rows) == 2
        assert len(results.problems) == 1
        assert results.problems[0].startswith(f"{results.path}:3: not a result row, skipped")
        results.append(row(8))
        results.append(row(16))
    assert stored(tmp_path) == [1, 2, 8, 16]
    assert read_rows(results.path)[1] == []  # what holds results to others takes no file with half a row


@pytest.mark.parametrize("taken", [1, 2])  # the line's end alone, or more
def test_a_last_row_without_its_end_of_line_is_kept_if_it_is_whole(tmp_path: Path, taken: int) -> None:
    with ResultsFile(tmp_path) as results:
        results.append(row(1))
        results.append(row(2))
    results.path.write_bytes(results.path.read_bytes()[:-taken])
    with ResultsFile(tmp_path) as results:
        results.append(row(4))
    assert stored(tmp_path) == ([1, 2, 4] if taken == 1 else [1, 4])


def test_a_row_that_was_cut_short_alone_is_gone_over(tmp_path: Path) -> None:
    with ResultsFile(tmp_path) as results:
        results.append(row(1))
    results.path.write_bytes(results.path.read_bytes()[:-40])
    with ResultsFile(tmp_path) as results:
        results.append(row(1))
    assert stored(tmp_path) == [1]


@pytest.mark.parametrize(
    "foreign", [b"my own notes\n", b"PK\x03\x04\x00", b'{"loss": 2.5}\n{"loss": 2.4}\n', b"[]"]
)
def test_nothing_is_written_to_a_file_of_somebody_else(tmp_path: Path, foreign: bytes) -> None:
    (tmp_path / RESULTS_FILE).write_bytes(foreign)
    for _ in range(2):  # the lock is free again
        with pytest.raises(UserError, match=r"is not a file of results .* choose another --output, or move"):
            ResultsFile(tmp_path)
    assert (tmp_path / RESULTS_FILE).read_bytes() == foreign
    with ResultsFile(tmp_path, fresh=True) as results:  # it is moved aside
        results.append(row(1))
        assert results.moved.read_bytes() == foreign


@pytest.mark.parametrize(
    "spoilt",
    [
        b"garbage",
        b"\xff\xfe\x00",
        b"[]",
        b"{}",
        b'{"key": "x", "cell": {}, "status": "fine", "measurement": {}}',
        b"[",
    ],
)
def test_corrupt_lines_cost_only_themselves(tmp_path: Path, spoilt: bytes) -> None:
    with ResultsFile(tmp_path) as results:
        results.append(row(1))
        results.append(row(2))
    lines = results.path.read_bytes().splitlines()
    results.path.write_bytes(b"\n".join([lines[0], spoilt, b"", lines[1], b""]))
    rows, problems = read_rows(results.path)
    assert len(rows) == 2
    assert [problem.startswith(f"{results.path}:2: not a result row, skipped") for problem in problems] == [
        True
    ]


def test_fresh_moves_old_results_aside(tmp_path: Path) -> None:
    for world in (1, 2, 4):
        with ResultsFile(tmp_path, fresh=True) as results:
            assert results.rows == {}
            results.append(row(world))
    assert stored(tmp_path) == [4]
    assert read_rows(tmp_path / "cells.1.jsonl")[0][0]["cell"]["sizes"]["sp"] == 1
    assert read_rows(tmp_path / "cells.2.jsonl")[0][0]["cell"]["sizes"]["sp"] == 2


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    with ResultsFile(tmp_path), pytest.raises(UserError, match="another sweep is writing to"):
        ResultsFile(tmp_path)
    with ResultsFile(tmp_path) as results:
        results.append(row(1))


def disk_with_room_for(monkeypatch: pytest.MonkeyPatch, nbytes: int, fd: int) -> None:
    """Let writes to the file through up to so many bytes, then fail as a full disk does."""
    write = os.write

    def limited(target: int, data: bytes) -> int:
        if target != fd:
            return write(target, data)
        room = nbytes - os.fstat(fd).st_size
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(target, data[:room])

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("room", [0, 100])
def test_full_disk_keeps_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    with ResultsFile(tmp_path) as results:
        results.append(row(1))
        before = results.path.read_bytes()
        with monkeypatch.context() as patch:
            disk_with_room_for(patch, len(before) + room, results._fd)
            with pytest.raises(UserError, match=r"^cannot write to .*no space left|No space left"):
                results.append(row(2))
        assert results.path.read_bytes() == before
        results.append(row(4))  # somebody has made room
    assert stored(tmp_path) == [1, 4]


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"^cannot write results to .*Not a directory; choose another --output$"
    ):
        ResultsFile(tmp_path / "file" / "below")

    def refuse(*args: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:  # permissions do not stop root, who may run this
        patch.setattr(os, "open", refuse)
        with pytest.raises(UserError, match="Read-only file system; choose another --output"):
            ResultsFile(tmp_path)


def test_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / RESULTS_FILE).mkdir(parents=True)
    with pytest.raises(UserError, match="Is a directory"):
        ResultsFile(tmp_path / "a")
    with pytest.raises(UserError, match=r"^cannot read .*Is a directory$"):
        read_rows(tmp_path / "a" / RESULTS_FILE)

    def refuse(path: Path, mode: str) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(UserError, match=r"^cannot read .*Permission denied$"):
            ResultsFile(tmp_path)
    assert read_rows(tmp_path / "absent") == ([], [])


def test_frame(tmp_path: Path) -> None:
    frame = as_frame([row(1), row(4), row(5)])
    assert list(frame.world_size) == [1, 4, 5]
    assert list(frame.status) == ["ok", "ok", "failed"]
    assert frame.peak_memory_bytes[0] == 2**30
    assert frame.sent_bytes[1] == 2**20
    assert frame.answer.isna().tolist() == [False, False, True]


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
