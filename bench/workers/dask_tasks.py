"""The tasks of a Dask worker: it checks its installation, and has a :class:`Runner` run cells."""

from __future__ import annotations

import platform
import threading
from dataclasses import dataclass, field
from functools import partial

from spbench.bench.workers.executor import Parcel
from spbench.bench.workers.installation import Installation
from spbench.bench.workers.runner import Runner
from spbench.bench.workers.worker import Outcome


@dataclass(frozen=True)
class SweepOnDask:
    """What the tasks of a sweep share.

    Attributes:
        identity: unique to the sweep.
        run: the function that measures cells, pickled.
        environment: variables for the processes that run cells.
        installation: of the machine that sends the cells.
    """

    identity: str
    run: bytes
    environment: dict[str, str]
    installation: Installation


class OtherInstallation(Exception):
    """This Dask worker's installation is not that of the machine that sends the cells."""


@dataclass
class _Idle:
    """The runners of this process that have no cell; all belong to one sweep."""

    identity: str = ""
    runners: list[Runner] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


_idle = _Idle()


def run_cell(sweep: SweepOnDask, parcel: Parcel) -> Outcome:
    """The task: run a cell on this machine.

    Raises:
        OtherInstallation: this worker, which came after the sweep began, has another installation.
        distributed.Reschedule: this worker is closing, so that another must take the cell; or the cell was
            cancelled.
    """
    from distributed import Reschedule, get_worker

    runner = _runner_for(sweep)
    worker = get_worker()
    outcome = runner.outcome(parcel, partial(_wanted, worker, worker.get_current_task()))
    if outcome is None:
        runner.end()
        raise Reschedule
    with _idle.lock:
        if sweep.identity == _idle.identity:
            _idle.runners.append(runner)
            return outcome
    runner.end()  # another sweep has begun here
    return outcome


def _wanted(worker: object, key: object) -> bool:
    """Whether the worker goes on and the scheduler still wants the task."""
    state = worker.state.tasks.get(key)  # type: ignore[attr-defined]
    running = worker.status.name in ("running", "paused")  # type: ignore[attr-defined]
    return running and state is not None and state.state == "executing"


def _runner_for(sweep: SweepOnDask) -> Runner:
    """A runner without a cell, started if there is none."""
    with _idle.lock:
        if _idle.identity != sweep.identity:
            if difference := sweep.installation.difference(Installation.here()):
                raise OtherInstallation(f"on {platform.node()} {difference}")
            others, _idle.runners, _idle.identity = _idle.runners, [], sweep.identity
            _end_all(others)
        unusable = [runner for runner in _idle.runners if not runner.usable]
        _idle.runners = [runner for runner in _idle.runners if runner.usable]
        _end_all(unusable)
        return _idle.runners.pop() if _idle.runners else Runner(sweep.run, sweep.environment)


def end_runners(identity: str) -> None:
    """End the runners of a sweep that have no cell; the others end once their cells are cancelled."""
    with _idle.lock:
        if _idle.identity == identity:
            _end_all(_idle.runners)
            _idle.runners, _idle.identity = [], ""


def _end_all(runners: list[Runner]) -> None:
    for runner in runners:
        runner.end()
