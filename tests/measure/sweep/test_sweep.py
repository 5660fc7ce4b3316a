"""Sweeps: failures are rows, deaths cost one cell, and what has ended is kept through any interruption."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spbench.bench.cell import Cell, Learning
from spbench.bench.errors import UserError
from spbench.bench.measure.sweep.results import ResultsFile, read_rows
from spbench.bench.measure.sweep.sweep import _relative_cost, as_row, sweep, unfinished
from spbench.bench.measure.sweep.worker import Crew
from spbench.bench.measurement import Outcome
from tests.bench import fakes
from tests.bench.fakes import cell
from tests.bench.hosts import PATIENCE_S, needs_proc
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
    with Crew(fakes.answer) as crew, ResultsFile(tmp_path) as results:
        sweep([cell(1)], results, crew=crew, jobs=2)
        (worker,) = crew.workers
        rows = sweep([cell(2), cell(4)], results, crew=crew, jobs=1)
        assert [row["status"] for row in rows] == ["ok", "ok"]
        assert crew.workers == [worker]
        crew.run = fakes.moody
        crew.dismiss()
        assert not worker.folder.exists()
        sweep([cell(2), cell(3)], results, crew=crew, jobs=1)
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
