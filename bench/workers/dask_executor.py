"""Cells on the workers of a Dask cluster (https://distributed.dask.org), which may come and go meanwhile.

Dask schedules: which worker takes a cell, and that another one takes it again when a worker is gone, at most
``distributed.scheduler.allowed-failures`` times. Its workers need no files of the machine that sends cells:
a cell travels with the figures of its cluster.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spbench.bench.cell import Cell
from spbench.bench.disk_cache import CACHE_FOLDER
from spbench.bench.errors import UserError
from spbench.bench.ranks.processes import STACKS_FOLDER
from spbench.bench.ranks.rank_job import AGENTS
from spbench.bench.workers.dask_tasks import OtherInstallation, SweepOnDask, end_runners, run_cell
from spbench.bench.workers.executor import Executor, Parcel
from spbench.bench.workers.installation import Installation
from spbench.bench.workers.worker import Outcome, Run

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
        there = self.client.run(Installation.here, on_error="return")
        for worker, found in there.items():
            if isinstance(found, Installation):
                problem = self.installation.difference(found)
            else:
                # Dask puts what it cannot pass on as it is into an exception of no kind
                what = str(found) if type(found) is Exception else f"{type(found).__name__}: {found}"
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
            # no more than run at a time: a worker that dies is held against every task that it has
            room = self.at_once
            while waiting and len(self.running) < room:
                cell = waiting.popleft()
                on_start(cell)
                # each cell is a task of its own, even one that was sent before
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
            "install it by: pip install 'spbench[cluster]'"
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
    """The settings of this program that are no folder or process of this machine."""
    local = (CACHE_FOLDER, STACKS_FOLDER, AGENTS)
    return {k: v for k, v in os.environ.items() if k.startswith("SPBENCH_") and k not in local}
