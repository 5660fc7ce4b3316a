"""Cells on the workers of a Dask cluster (https://distributed.dask.org), which may come and go meanwhile.

Dask decides which worker takes a cell, and gives it to another when that worker is gone, at most
``distributed.scheduler.allowed-failures`` times. The workers need no files of the machine that sends cells: a
cell travels with its cluster. A task checks the installation of its worker, and has a :class:`Runner` run the
cell.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import queue
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from spbench.bench.cell import Cell
from spbench.bench.disk_cache import CACHE_FOLDER
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.run_cell import Run
from spbench.bench.measure.processes.rank_job import AGENTS
from spbench.bench.measure.processes.starting import STACKS_FOLDER
from spbench.bench.measure.sweep.executor import Executor, Installation, Parcel
from spbench.bench.measure.sweep.runner import Runner
from spbench.bench.measurement import Outcome

if TYPE_CHECKING:
    from distributed import Client, Future

#: seconds for the scheduler to answer at first
CONNECT_LIMIT_S = 10.0

#: seconds for the first worker to be there
WORKERS_LIMIT_S = 30.0

#: seconds between two looks at how many workers there are
_LOOK_S = 1.0

#: seconds for the scheduler to take note, on leaving
_FAREWELL_S = 10.0

_log = logging.getLogger(__name__)


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


class DaskExecutor(Executor):
    """The workers of the Dask scheduler at HOST:PORT; each runs as many cells at a time as it has threads."""

    name = "dask"
    form = "dask://HOST:PORT"

    def __init__(self, address: str):
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@]+):\d{1,5}", address):
            raise UserError(f"dask://{address}: the address of a Dask scheduler looks like {self.form}")
        self.address = address
        self.running: dict[Future, Cell] = {}
        self._has_workers = True
        self.identity = uuid.uuid4().hex
        self.installation = Installation.here()
        self.client = _connected(address)
        try:
            self._check_workers()
        except BaseException:
            self.client.close()
            raise

    def _check_workers(self) -> None:
        """UserError if there is no worker, or one that has another installation."""
        try:
            self.client.wait_for_workers(1, timeout=WORKERS_LIMIT_S)
        except TimeoutError:
            raise UserError(
                f"the Dask scheduler at {self.address} has no workers; start some, by: "
                f"dask worker {self.address} --nworkers auto --nthreads 1"
            ) from None
        for worker, answer in self.client.run(Installation.here, on_error="return").items():
            if isinstance(answer, Installation):
                problem = self.installation.difference(answer)
            else:
                # Dask puts an error that it cannot pass on into a plain Exception
                what = str(answer) if type(answer) is Exception else f"{type(answer).__name__}: {answer}"
                problem = f"cannot load spbench ({what}); install the same as here and start it again"
            if problem:
                raise UserError(f"the Dask worker {worker} {problem}")

    @property
    def at_once(self) -> int:
        try:
            workers = self.client.nthreads()
        except (OSError, ValueError) as error:
            raise self._gone() from error
        if self._has_workers and not workers:
            _log.warning("dask://%s has no workers any more; waiting for one", self.address)
        self._has_workers = bool(workers)
        return max(1, sum(workers.values()))

    def outcomes(
        self, cells: Sequence[Cell], run: Run, on_start: Callable[[Cell], None]
    ) -> Iterator[tuple[Cell, Outcome]]:
        sweep = SweepOnDask(self.identity, pickle.dumps(run), _environment(), self.installation)
        waiting = deque(cells)
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        while waiting or self.running:
            # no more than can run at a time: Dask counts the death of a worker against every task it has
            room = self.at_once
            while waiting and len(self.running) < room:
                cell = waiting.popleft()
                on_start(cell)
                # not pure: a cell that was sent before is a new task
                future = self.client.submit(run_cell, sweep, Parcel.of(cell), pure=False)
                self.running[future] = cell
                future.add_done_callback(ended.put)
            with suppress(queue.Empty):
                future = ended.get(timeout=_LOOK_S)
                outcome = self._outcome(future)
                yield self.running.pop(future), outcome

    def _outcome(self, future: Future) -> Outcome:
        from distributed.scheduler import KilledWorker

        if future.cancelled():
            raise self._gone()
        error: Any = future.exception()
        match error:
            case None:
                return future.result()
            case OtherInstallation():
                raise UserError(f"a Dask worker {error}; the same command goes on")
            case KilledWorker():
                return Outcome(
                    "failed",
                    f"{error.allowed_failures + 1} Dask workers died while they had it, the last one "
                    f"{error.last_worker.address}; their logs may say why",
                )
            case _:
                what = " ".join(f"{type(error).__name__}: {error}".split())
                return Outcome("failed", f"the Dask worker could not run it: {what}")

    def _gone(self) -> UserError:
        return UserError(
            f"the Dask scheduler at {self.address} is gone; start it and its workers again, "
            "then the same command goes on"
        )

    def __exit__(self, *error: object) -> None:
        with suppress(Exception):  # the scheduler may be gone
            self.client.cancel(list(self.running))
            self.client.run(end_runners, self.identity, on_error="ignore")
        with suppress(Exception):
            self.client.close(timeout=_FAREWELL_S)


def _connected(address: str) -> Client:
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError(
            f"dask://{address} needs the package dask[distributed], which is not here ({error}); "
            "install it by: pip install -c constraints.txt -e '.[cluster]' (from PyPI: 'spbench[cluster]')"
        ) from error
    try:
        return Client(address, timeout=CONNECT_LIMIT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Dask scheduler answers at {address} ({_first_cause(error)}); start one, by: dask scheduler"
        ) from error


def _first_cause(error: BaseException) -> str:
    """Why a connection failed, without the layers around it."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


def _environment() -> dict[str, str]:
    """The settings of spbench, but for those that name a folder or process of this machine."""
    local = (CACHE_FOLDER, STACKS_FOLDER, AGENTS)
    return {k: v for k, v in os.environ.items() if k.startswith("SPBENCH_") and k not in local}
