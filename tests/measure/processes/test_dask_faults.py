"""Sweeps on a real Dask cluster of which parts are killed: no row is lost or doubled, no process is left."""

import importlib.util
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.sweep.executor import Executor
from spbench.bench.measure.sweep.results import ResultsFile, read_rows
from spbench.bench.measure.sweep.sweep import sweep
from tests.bench import fakes
from tests.bench.fakes import cell
from tests.bench.hosts import PATIENCE_S, needs_proc, until
from tests.measure.processes.command_process import ROOT, Command
from tests.measure.processes.dask_processes import DaskProcesses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("distributed") is None, reason="needs dask[distributed], the extra 'cluster'"
    ),
    needs_proc,
]


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[DaskProcesses]:
    """Two workers; of tasks whose worker dies a second time it is not tried again."""
    (tmp_path / "dask").mkdir()
    with DaskProcesses(
        tmp_path / "dask", {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    ) as processes:
        processes.start_workers(2)
        yield processes


@pytest.fixture
def command(tmp_path: Path, dask: DaskProcesses) -> Iterator[Command]:
    command = Command(tmp_path, "--executor", dask.address)
    yield command
    command.end()


def _point(key: str) -> str:
    """Model, strategy and sizes of a key; the rest has the path of the cluster's file, another one there."""
    return "/".join(key.split("/")[:3])


def check_whole(command: Command) -> None:
    """Each of the five cells has one line, with what it has on one machine."""
    lines = [json.loads(line) for line in command.results.read_text().splitlines()]
    worlds = [cell["sizes"].get("tp", 1) * cell["sizes"].get("sp", 1) for cell in (x["cell"] for x in lines)]
    assert sorted(worlds) == [1, 1, 2, 4, 8]
    assert [line["measurement"]["answer"] for line in lines] == [1000 * world for world in worlds]
    assert len({line["key"] for line in lines}) == 5
    assert all(line["provenance"]["host"] for line in lines)


def test_a_worker_that_is_killed(command: Command, dask: DaskProcesses) -> None:
    """Its cell runs again elsewhere, and what it has started on its machine ends."""
    process = command.start()
    command.until_two_are_held_up()
    ended = {_point(row["key"]) for row in read_rows(command.results)[0]}
    held_up = {_point(key): pid for pid, key in command.begun() if _point(key) not in ended}
    assert len(held_up) == 2
    dask.workers[0].kill()
    until(lambda: len({*held_up.values()} & {*command.processes()}) == 1)
    command.gate.touch()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "5 cells; running 5, 2 at a time" in err
    check_whole(command)
    times = Counter(_point(key) for _, key in command.begun())
    assert sorted(times.values()) == [1, 1, 1, 1, 2]
    assert next(point for point, count in times.items() if count == 2) in held_up
    command.until_processes_are_gone()
    assert dask.files_left() == []


def test_an_interrupted_sweep_leaves_the_workers_free(command: Command, dask: DaskProcesses) -> None:
    """Ctrl-C, then kill -9: each time the cells that were held up end, and Dask's workers take new ones."""
    process = command.start()
    command.until_two_are_held_up()
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == (
        f"spbench: interrupted; 2 of 5 cells are in {command.results}, the same command goes on"
    )
    assert "Traceback" not in err
    command.until_processes_are_gone()

    process = command.start()
    until(lambda: len(command.begun()) == 6)
    process.kill()
    process.communicate()
    command.until_processes_are_gone()
    assert len(read_rows(command.results)[0]) == 2

    command.gate.touch()
    process = command.start()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    check_whole(command)
    command.until_processes_are_gone()
    assert [worker.poll() for worker in dask.workers] == [None, None]
    assert dask.files_left() == []


def test_a_scheduler_that_is_killed(command: Command, dask: DaskProcesses) -> None:
    process = command.start()
    command.until_two_are_held_up()
    dask.scheduler.kill()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, err
    assert err.splitlines()[-1].endswith(
        "is gone; start it and its workers again, then the same command goes on"
    )
    assert len(read_rows(command.results)[0]) == 2
    command.until_processes_are_gone()
    assert dask.files_left() == []


def test_a_cell_that_kills_its_workers_is_a_failed_row(tmp_path: Path, dask: DaskProcesses) -> None:
    dask.start_workers(1)
    cells = [cell(world) for world in (1, 2, 4, 8)]
    with Executor(dask.address) as executor, ResultsFile(tmp_path) as results:
        rows = sweep(cells, results, run=fakes.killing_its_host, executor=executor)
        assert len(results.path.read_text().splitlines()) == 4
    assert [row["status"] for row in rows] == ["ok", "failed", "ok", "ok"]
    assert rows[1]["reason"].startswith(
        "2 Dask workers died while they had it, the last one tcp://127.0.0.1:"
    )
    assert sum(worker.poll() is None for worker in dask.workers) == 1


def test_a_time_limit_holds_there(
    tmp_path: Path, dask: DaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fakes.LOG, str(tmp_path / "log"))
    monkeypatch.setenv(fakes.GATE, str(tmp_path / "gate"))
    with Executor(dask.address) as executor, ResultsFile(tmp_path) as results:
        rows = sweep(
            [cell(2, timeout_s=2.0), cell(4, timeout_s=60.0)], results, run=fakes.gated, executor=executor
        )
    assert [row["status"] for row in rows] == ["timeout", "ok"]
    assert rows[0]["reason"] == "no end within its limit of 2 s"
    assert "in gated" in rows[0]["log"].split("-- stacks of the worker --")[1]


def test_workers_of_other_code_are_refused(tmp_path: Path) -> None:
    """One that has another line, and one that has no spbench; each by its address."""
    copy, broken = tmp_path / "copy", tmp_path / "broken" / "spbench"
    for name in ("spbench", "bench", "impls", "results/papers", "scenarios", "plots"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True)
    with (copy / "bench" / "measure" / "trace" / "memory.py").open("a") as file:
        file.write("\nANOTHER_VERSION = True\n")
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no such luck')\n")
    (tmp_path / "dask").mkdir()
    with DaskProcesses(tmp_path / "dask") as dask:
        for path, problem in (
            (copy, r"has other code of spbench or its plug-ins \(.*\); install"),
            (broken.parent, r"cannot load spbench \(ImportError\('no such luck'\)\); install"),
        ):
            dask.start_workers(1, {"PYTHONPATH": str(path)})
            with pytest.raises(UserError, match=rf"^the Dask worker tcp://127.0.0.1:\d+ {problem}"):
                Executor(dask.address)
            dask.workers[-1].kill()


def test_a_cluster_file_that_workers_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real virtual cells on a cluster file by a relative path: rows as on this machine, but for the times."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: piz-daint-p100\nabout: of my own\ndevices_per_node: 2\n")
    Path("scenario.yaml").write_text(
        "title: mine\n"
        "defaults: {cluster: ./mine.yaml, model: bert-tiny, batch: 4, seq_len: 24, precision: fp16}\n"
        "groups: [{strategy: ring_self_attention, sizes: {sp: [2, 3, 4]}}]\n"
    )
    Path("dask").mkdir()
    with DaskProcesses(Path("dask").resolve(), {"PYTHONPATH": str(ROOT)}) as dask:
        dask.start_workers(2, nanny=True)
        arguments = ("run", "--scenario", "scenario.yaml", "--format", "csv")
        assert exit_code([*arguments, "--output", "here"]) == 0
        assert exit_code([*arguments, "--output", "there", "--executor", dask.address]) == 0
        there, here = (read_rows(Path(name, "cells.jsonl"))[0] for name in ("there", "here"))
        same = ("cell", "status", "measurement", "digest")
        found = [{row["key"]: [row[name] for name in same] for row in rows} for rows in (there, here)]
        assert found[0] == found[1]
        assert len(there) == 3
        assert all(row["measurement"]["step_time_s"] > 0 for row in there)
        assert dask.files_left() == []
