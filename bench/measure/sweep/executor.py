"""Cells on the workers of a Dask cluster (https://distributed.dask.org), which may come and go meanwhile.

Dask decides which of its workers takes a cell, and gives the cell to another when that worker is gone, at
most ``distributed.scheduler.allowed-failures`` times. Its workers need no files of the machine that sends
cells, because a cell is sent with its cluster. A worker runs :mod:`measure.sweep.dask_task`.
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
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.run_cell import Run
from spbench.bench.measure.processes.stacks import AGENTS, STACKS_FOLDER
from spbench.bench.measure.sweep import dask_task
from spbench.bench.measurement import Outcome
from spbench.bench.yaml_text import dump

if TYPE_CHECKING:
    from distributed import Client, Future

#: seconds that the scheduler has to answer the first time
CONNECT_LIMIT_S = 10.0

#: seconds that the first worker has to appear
WORKERS_LIMIT_S = 30.0

#: seconds between two looks at how many workers there are
_LOOK_S = 1.0

#: seconds that closing the connection to the scheduler may take
_FAREWELL_S = 10.0

#: the form of an executor's address, and HOST:PORT within it
_FORM = re.compile(r"dask://((?:\[[0-9a-fA-F:.]+\]|[^\s:/@]+):\d{1,5})")

_log = logging.getLogger(__name__)


def executor_at(address: str | None) -> AbstractContextManager[Executor | None]:
    """A context manager of the executor at an address, or of None for no address."""
    return nullcontext() if address is None else Executor(address)


class Executor(AbstractContextManager["Executor"]):
    """Runs cells on the workers of the Dask scheduler at dask://HOST:PORT, for one sweep or several in turn;
    each worker runs as many cells at a time as it has threads.

    Leaving the context cancels the cells that have not ended, and leaves nothing behind on the machines.

    Raises:
        UserError: nothing is at that address, or it cannot run cells; with the remedy.
    """

    def __init__(self, address: str):
        if (place := _FORM.fullmatch(address)) is None:
            raise UserError(f"no executor has the address {address!r}; addresses look like dask://HOST:PORT")
        self.address = place[1]
        self.running: dict[Future, Cell] = {}
        self._has_workers = True
        self.identity = uuid.uuid4().hex
        self.installation = dask_task.Installation.here()
        self.client = _connected(self.address)
        try:
            self._check_workers()
        except BaseException:
            self.client.close()
            raise

    def _check_workers(self) -> None:
        """Raise UserError if there is no worker, or if one has another installation than this machine."""
        try:
            self.client.wait_for_workers(1, timeout=WORKERS_LIMIT_S)
        except TimeoutError:
            raise UserError(
                f"the Dask scheduler at {self.address} has no workers; start some, by: "
                f"dask worker {self.address} --nworkers auto --nthreads 1"
            ) from None
        for worker, answer in self.client.run(dask_task.Installation.here, on_error="return").items():
            if isinstance(answer, dask_task.Installation):
                problem = self.installation.difference(answer)
            else:
                # Dask puts an error that it cannot pass on into a plain Exception
                what = str(answer) if type(answer) is Exception else f"{type(answer).__name__}: {answer}"
                problem = f"cannot load spbench ({what}); install the same as here and start it again"
            if problem:
                raise UserError(f"the Dask worker {worker} {problem}")

    @property
    def at_once(self) -> int:
        """How many cells the Dask workers can run at a time now; at least 1."""
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
        """Start cells in this order; yield each cell with its outcome as soon as it ends.

        Args:
            run: the function that measures a cell, of a module that the other machines have too.
            on_start: called as a cell is sent off.

        Raises:
            UserError: the machines cannot go on; earlier outcomes stay valid.
        """
        sweep = dask_task.SweepOnDask(self.identity, pickle.dumps(run), _environment(), self.installation)
        waiting = deque(cells)
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        while waiting or self.running:
            # send no more cells than can run: Dask counts the death of a worker against all its tasks
            room = self.at_once
            while waiting and len(self.running) < room:
                cell = waiting.popleft()
                on_start(cell)
                # not pure: a cell that was sent before is a new task
                cluster = load_cluster(cell.cluster)  # as its file is now
                sent = sweep, cell, cluster.name, dump(cluster.content)
                future = self.client.submit(dask_task.run_cell_here, *sent, pure=False)
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
            case dask_task.OtherInstallation():
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
            self.client.run(dask_task.end_idle_workers, self.identity, on_error="ignore")
        with suppress(Exception):
            self.client.close(timeout=_FAREWELL_S)


def _connected(address: str) -> Client:
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError(
            f"dask://{address} needs the package dask[distributed], which is not here ({error}); "
            "install it by: pip install 'dask[distributed]'"
        ) from error
    try:
        return Client(address, timeout=CONNECT_LIMIT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Dask scheduler answers at {address} ({_first_cause(error)}); start one, by: dask scheduler"
        ) from error


def _first_cause(error: BaseException) -> str:
    """The text of the first error in a chain of causes."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


def _environment() -> dict[str, str]:
    """The variables SPBENCH_* of this process, except those that name a folder or process of this machine."""
    local = (CACHE_FOLDER, STACKS_FOLDER, AGENTS)
    return {k: v for k, v in os.environ.items() if k.startswith("SPBENCH_") and k not in local}
