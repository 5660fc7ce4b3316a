"""Cells on other machines: what is sent where, and every fault is one line. Real processes of Dask are
killed in test_dask_faults.py; here its scheduler and workers are threads of this process, with workers of
ours below."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.sweep import dask_task
from spbench.bench.measure.sweep import executor as executor_module
from spbench.bench.measure.sweep.dask_task import Installation
from spbench.bench.measure.sweep.executor import Executor
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import at_once, sweep, unfinished
from spbench.bench.measure.sweep.worker import Crew, Worker
from tests.bench import fakes
from tests.bench.fakes import cell
from tests.bench.hosts import until
from tests.grid import tabled

# imported where it is used: each process of a test run would do so to collect its tests
if TYPE_CHECKING:
    import distributed

pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="needs dask[distributed], the extra 'cluster'"
)


def _scheduler(workers: int) -> distributed.LocalCluster:
    import distributed

    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address=":0",
        silence_logs=logging.CRITICAL,
    )


@pytest.fixture(scope="module")
def scheduler() -> Iterator[distributed.LocalCluster]:
    with _scheduler(workers=2) as cluster:
        yield cluster


@pytest.fixture
def address(scheduler: distributed.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(dask_task, "stop_server", lambda: None)  # that of all tests
    return str(scheduler.scheduler_address).replace("tcp", "dask")


def test_rows_are_those_of_this_machine(tmp_path: Path, address: str) -> None:
    """Engines that are not exact stay here, where the crew runs them; unsupported and failed are rows too."""
    cells = [*(cell(world) for world in (1, 2, 3, 4, 5)), cell(2, "distributed")]
    begun: list[str] = []
    with ResultsFile(tmp_path / "here") as results:
        here = sweep(cells[:5], results, run=fakes.answer, jobs=1)
    with Executor(address) as executor, Crew() as crew, ResultsFile(tmp_path / "there") as results:
        assert at_once(cells, 1, executor) == 2
        there = sweep(
            cells,
            results,
            run=fakes.answer,
            crew=crew,
            executor=executor,
            on_start=lambda c: begun.append(c.key),
        )
        assert len(crew.workers) == 1  # for the cell on real ranks alone
        assert len(results.path.read_text().splitlines()) == 6
        assert [c.engine for c in unfinished(cells, results)] == ["virtual"]  # the one that failed
    assert sorted(begun) == sorted(c.key for c in cells)
    same = ("key", "status", "reason", "measurement", "digest")
    assert [[row[name] for name in same] for row in there[:5]] == [
        [row[name] for name in same] for row in here
    ]
    assert there[5]["status"] == "ok"


def test_processes_of_an_earlier_sweep_are_ended(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next sweep, where the earlier one has vanished; and each sweep ends its own."""
    idle = dask_task._idle
    with ResultsFile(tmp_path) as results, monkeypatch.context() as patched:
        patched.setattr(dask_task, "end_idle_workers", lambda identity: None)  # as if it were killed
        with Executor(address) as executor:
            sweep([cell(1)], results, run=fakes.answer, executor=executor)
    (earlier,) = idle.workers
    with ResultsFile(tmp_path) as results, Executor(address) as executor:
        sweep([cell(2)], results, run=fakes.answer, executor=executor)
        (worker,) = idle.workers
        assert worker is not earlier
        assert not earlier.folder.exists()
    assert (idle.workers, worker.folder.exists()) == ([], False)


def test_idle_processes_end_by_themselves(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_task, "IDLE_LIMIT_S", 0.1)
    with ResultsFile(tmp_path) as results, Executor(address) as executor:
        sweep([cell(1)], results, run=fakes.answer, executor=executor)
        until(lambda: not dask_task._idle.workers)
        assert sweep([cell(2)], results, run=fakes.answer, executor=executor)[0]["status"] == "ok"


def test_a_cell_takes_its_cluster_along(address: str, tmp_path: Path) -> None:
    """A worker has no file of that path; it gets the figures, and messages name the path that was given."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: piz-daint-p100\nabout: of my own\ndevices_per_node: 2\n")
    sent, expected = cell(2).model_copy(update={"cluster": str(mine)}), load_cluster(str(mine))
    with Executor(address) as executor:
        ((_, outcome),) = executor.outcomes([sent], fakes.cluster_of, lambda cell: None)
    figures = outcome.measurement["meters"]
    assert figures["cluster"] == expected.model_dump(mode="json")
    assert figures["file"].endswith("/mine.yaml")
    assert figures["file"] != str(mine)
    assert outcome.reason == f"cluster {mine} is this one"
    assert outcome.provenance is not None


def test_a_process_that_stays_runs_what_each_cell_is_sent_with(address: str) -> None:
    with Executor(address) as executor:
        for run, answer in ((fakes.answer, 1000), (fakes.cluster_of, None)):
            ((_, outcome),) = executor.outcomes([cell(1)], run, lambda cell: None)
            assert outcome.measurement["answer"] == answer
            (worker,) = dask_task._idle.workers
    assert not worker.folder.exists()


HERE = Installation("1.0", "2.13.0", frozenset({"spbench.models:mine"}), "abc")


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (Installation("2.0", "2.13.0", HERE.plugins, "abc"), ""),
        (Installation("1.0", "2.11.0", HERE.plugins, "abc"), "has torch 2.11.0, not 2.13.0; install"),
        (Installation("1.0", "2.13.0", frozenset(), "x"), "lacks the plug-ins spbench.models:mine; install"),
        (
            Installation("1.0", "2.13.0", HERE.plugins | {"spbench.models:b"}, "x"),
            "has the plug-ins spbench.models:b, which are not here; install",
        ),
        (
            Installation("0.9", "2.13.0", HERE.plugins, "def"),
            "has other code of spbench or its plug-ins (version 0.9, digest def; here 1.0, abc); install",
        ),
    ],
)
def test_what_differs_between_installations(there: Installation, problem: str) -> None:
    assert HERE.difference(there).startswith(problem)
    assert bool(HERE.difference(there)) == bool(problem)


OTHER = Installation("1.0", "2.11.0", HERE.plugins, "abc")
#: what :func:`next_installation` says, call by call
_installations: list[Installation] = []


def next_installation() -> Installation:
    return _installations.pop(0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            [HERE, HERE, OTHER],
            r"the Dask worker tcp://127.0.0.1:\d+ has torch 2.11.0, not 2.13.0; install .*",
        ),
        # one that comes when the sweep has begun is found out when it is given a cell
        ([HERE, HERE, HERE, OTHER], r"a Dask worker on \S+ has torch 2.11.0, .*; the same command goes on"),
    ],
)
def test_workers_of_another_installation_are_refused(
    asked: list[Installation], message: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installations[:] = asked
    monkeypatch.setattr(Installation, "here", next_installation)
    with pytest.raises(UserError, match=f"^{message}$"), ResultsFile(tmp_path) as results:  # noqa: SIM117
        with Executor(address) as executor:
            sweep([cell(1)], results, run=fakes.answer, executor=executor)
    assert not _installations


def test_a_scheduler_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "WORKERS_LIMIT_S", 0.1)
    with (
        _scheduler(workers=0) as empty,
        pytest.raises(UserError, match=r"has no workers; start some, by: dask"),
    ):
        Executor(str(empty.scheduler_address).replace("tcp", "dask"))


def test_without_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match=r"dask\[distributed\].*pip install 'dask\[distributed\]'"):
        Executor("dask://127.0.0.1:1")


@tabled(__file__, "addresses_that_are_none")
def test_addresses_that_are_none(
    executor: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, before any earlier result is moved aside."""
    monkeypatch.setattr(executor_module, "CONNECT_LIMIT_S", 1.0)
    with ResultsFile(tmp_path):
        pass
    (tmp_path / "cells.jsonl").write_text("{}\n")
    arguments = ("run", "--scenario", "gate", "--fresh", "--output", str(tmp_path), "--executor", executor)
    assert exit_code(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"spbench: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["cells.jsonl"]


def test_an_idle_process_that_has_died_is_ended_before_another_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[object] = []
    dead, lives = (cast(Worker, SimpleNamespace(usable=usable)) for usable in (False, True))
    monkeypatch.setattr(dask_task, "_idle", dask_task._Idle("a sweep", [lives, dead]))
    monkeypatch.setattr(dask_task, "end_workers", ended.extend)
    asked = dask_task.SweepOnDask("a sweep", b"", {}, HERE)
    assert dask_task._worker_for(asked) is lives
    assert ended == [dead]
