"""A cell as a task of a Dask worker: what this machine has installed, and the process that runs the cell.

Dask runs tasks in threads, which cannot be ended. So a task starts a :class:`Worker`, a child process that
runs the cell with the same time limit and memory of its own as in a sweep on one machine.
"""

import atexit
import os
import platform
import threading
from dataclasses import dataclass, field, replace
from typing import Self

from spbench.bench.cell import Cell
from spbench.bench.measure.processes.starting import stop_server
from spbench.bench.measure.sweep.provenance import provenance
from spbench.bench.measure.sweep.worker import Worker, end_workers
from spbench.bench.measured_code import code_digest
from spbench.bench.measurement import Outcome
from spbench.impls import installed_version, loose_paths, plugin_entries

#: seconds without a cell after which a sweep's workers end, because the sweep may have vanished
IDLE_LIMIT_S = 60.0

#: seconds between two checks whether Dask still wants the result of a cell
_LOOK_S = 0.5


@dataclass(frozen=True)
class Installation:
    """The software with which a machine runs cells.

    Attributes:
        spbench, torch: their versions, as the package metadata has them.
        plugins: the entry points of plug-ins, each as GROUP:NAME, and files in no package, as file:NAME.py.
        code: the digest of spbench's code (:func:`code_digest`).
    """

    spbench: str
    torch: str
    plugins: frozenset[str]
    code: str

    @classmethod
    def here(cls) -> Self:
        """The installation of this machine, with its files as they are now."""
        code_digest.cache_clear()
        return cls(
            spbench=installed_version("spbench") or "none",
            torch=installed_version("torch") or "none",
            plugins=frozenset(
                [
                    *(f"{entry.group}:{entry.name}" for entry in plugin_entries()),
                    *(f"file:{path.name}" for path in loose_paths()),
                ]
            ),
            code=code_digest(),
        )

    def difference(self, other: Self) -> str:
        """How the other installation differs, and the remedy, as the end of a sentence; "" if it does not.

        The digest of the code decides, not spbench's version, which an editable checkout may lack.
        """
        if lacking := self.plugins - other.plugins:
            return f"lacks the plug-ins {_listed(lacking)}; install them there and start it again"
        if unknown := other.plugins - self.plugins:
            return f"has the plug-ins {_listed(unknown)}, which are not here; install the same on both"
        if self.torch != other.torch:
            return f"has torch {other.torch}, not {self.torch}; install the same there and start it again"
        if self.code != other.code:
            return (
                f"has other code of spbench or its plug-ins (version {other.spbench}, digest {other.code}; "
                f"here {self.spbench}, {self.code}); install the same there and start it again"
            )
        return ""


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


@dataclass(frozen=True)
class SweepOnDask:
    """The part of a sweep that is the same for all of its tasks on Dask.

    Attributes:
        identity: unique to the sweep.
        run: the function that measures cells, pickled.
        environment: variables for the processes that run cells.
        installation: the installation of the machine that sends the cells.
    """

    identity: str
    run: bytes
    environment: dict[str, str]
    installation: Installation


class OtherInstallation(Exception):
    """This Dask worker's installation is not that of the machine that sends the cells."""


@dataclass
class _Idle:
    """The workers of this process that have no cell; all belong to one sweep."""

    sweep: str = ""
    workers: list[Worker] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    limit: threading.Timer | None = None

    def keep(self, worker: Worker) -> None:
        """Add a worker that has no cell. All such workers end unless one gets a cell before the limit."""
        self.workers.append(worker)
        if self.limit is not None:
            self.limit.cancel()
        self.limit = threading.Timer(IDLE_LIMIT_S, _end_idle)
        self.limit.daemon = True
        self.limit.start()


_idle = _Idle()


def run_cell_here(sweep: SweepOnDask, cell: Cell, cluster: str, content: str) -> Outcome:
    """The task: run a cell below this process of Dask.

    Args:
        cluster: the name of the cell's cluster, whose file may be missing here, or differ.
        content: the text of a cluster file with all rates and limits, without ``extends``.

    Raises:
        OtherInstallation: this machine, which came after the sweep began, has another installation.
        distributed.Reschedule: this process is closing, so that another must take the cell; or the cell was
            cancelled.
    """
    from distributed import Reschedule, get_worker

    worker, host = _worker_for(sweep), get_worker()
    key = host.get_current_task()
    path = worker.folder / f"{cluster}.yaml"
    stays = False
    try:
        path.write_text(content, encoding="utf-8")
        worker.give(cell.model_copy(update={"cluster": str(path)}), sweep.run)
        while (outcome := worker.outcome(_LOOK_S)) is None:
            task = host.state.tasks.get(key)
            if host.status.name not in ("running", "paused") or task is None or task.state != "executing":
                raise Reschedule
        with _idle.lock:
            if stays := worker.usable and sweep.identity == _idle.sweep:
                _idle.keep(worker)
    finally:
        if not stays:
            end_workers([worker])
    reason = outcome.reason.replace(str(path), cell.cluster)
    return replace(outcome, reason=reason, provenance=provenance())


def _worker_for(sweep: SweepOnDask) -> Worker:
    """A worker of the sweep without a cell, or a new one. OtherInstallation if this machine's differs."""
    with _idle.lock:
        if _idle.sweep != sweep.identity:
            if difference := sweep.installation.difference(Installation.here()):
                raise OtherInstallation(f"on {platform.node()} {difference}")
            earlier, _idle.workers, _idle.sweep = _idle.workers, [], sweep.identity
            end_workers(earlier)
            stop_server()  # it may have imported other code, before the installation was changed
        while _idle.workers:
            if (worker := _idle.workers.pop()).usable:
                return worker
            end_workers([worker])
        return Worker({**os.environ, **sweep.environment})


def _end_idle() -> None:
    with _idle.lock:
        earlier, _idle.workers = _idle.workers, []
    end_workers(earlier)


def end_idle_workers(identity: str) -> None:
    """End the workers of a sweep that have no cell; the other workers end once their cells are cancelled."""
    if _idle.sweep == identity:
        _idle.sweep = ""
        _end_idle()


# before multiprocessing's own function, which would kill them before they remove their files
atexit.register(_end_idle)
