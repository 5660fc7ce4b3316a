"""What runs jobs on ranks, and the one on this machine: long-lived processes that run one job after another.

The processes are started once. Each job makes a process group of its own on as many of them as it needs.
"""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from spbench.bench.errors import UserError
from spbench.bench.measure.processes.rank_job import Answer, Job, RankError, collect
from spbench.bench.measure.processes.rank_process import RankProcess, Rendezvous
from spbench.bench.measure.processes.start_failures import FILES_OF_GROUP, FILES_OF_RANK, check_open_files
from spbench.bench.measure.processes.starting import STACKS_FOLDER, stacks_of
from spbench.impls.axes import whole_mesh

__all__ = ["RankError", "RankPool", "Ranks"]

#: of torch.distributed, by the type of the devices on which tensors are
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_LOOPBACK = "127.0.0.1"
#: seconds that a connection on this machine may take
_REACHED_S = 10.0


class Ranks(ABC):
    """Runs one job after another, each in a process group of its own. Use it as a context manager.

    Attributes:
        size: the largest number of ranks that a job can have.
        timeout_s: the limit of a job that is given none.
    """

    size: int
    timeout_s: float = 120.0

    def run(
        self,
        sizes: Mapping[str, int],
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        device: str = "cpu",
        backend: str = "",
    ) -> list[Any]:
        """Call ``function(mesh, *args)`` on every rank of a mesh; returns what each returned, by rank.

        Args:
            sizes: ranks along each axis of the mesh; axes that are left out have 1.
            function: of a module that the processes can import; its arguments and result are pickled.
            timeout_s: after it the job has failed and the processes are killed; the next job gets new ones.
            device: type of the devices on which the ranks' tensors are.
            backend: of torch.distributed; "": Gloo on CPUs, NCCL on GPUs, one a rank.

        Raises:
            RankError: a rank raised, ran out of memory, died, or did not answer in time.
            ValueError: the mesh has no such axis, or more than ``size`` ranks.
        """
        # pickled here, so that what cannot be pickled is the caller's error and reaches no rank
        work = pickle.dumps((function, args))
        limit = self.timeout_s if timeout_s is None else timeout_s
        job = Job(0, whole_mesh(sizes), device, backend or BACKENDS[device], limit, work)
        if job.ranks > self.size:
            raise ValueError(f"a job on {job.ranks} ranks does not fit in a pool of {self.size}")
        return self._run(job)

    @abstractmethod
    def _run(self, job: Job) -> list[Any]:
        """What each rank returned. The job has no number yet."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held; another job gets it again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RankPool(Ranks):
    """Processes of this machine that act as the ranks of one process group after another.

    They meet on the loopback interface, so that nobody on the network can reach them. They end with this
    process, however it ends.

    Args:
        size: the largest number of ranks that a job can have.
        timeout_s: the limit of jobs that are given none.

    Raises:
        UserError: this process may open too few files, or the loopback interface is down.
    """

    def __init__(self, size: int, timeout_s: float = Ranks.timeout_s):
        if size < 1:
            raise ValueError(f"a pool needs at least 1 rank, not {size}")
        check_open_files(FILES_OF_GROUP + FILES_OF_RANK * size, f"to start {size} ranks")
        self.size, self.timeout_s = size, timeout_s
        self._numbers = itertools.count()
        self._processes: list[RankProcess] = []
        self._store, self._port = loopback_store()
        # within the folder of a sweep's worker, which asks for stacks too
        self._folder = Path(tempfile.mkdtemp(prefix="spbench-ranks-", dir=os.environ.get(STACKS_FOLDER)))
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self._environment = {"GLOO_SOCKET_IFNAME": loopback, **os.environ, STACKS_FOLDER: str(self._folder)}

    def _run(self, job: Job) -> list[Any]:
        job = replace(job, number=next(self._numbers))
        self._folder.mkdir(mode=0o700, exist_ok=True)  # a closed pool has none
        while len(self._processes) < self.size:
            place = Rendezvous(_LOOPBACK, self._port)
            self._processes.append(RankProcess(place, len(self._processes), self._environment))
        try:
            for rank, process in enumerate(self._processes[: job.ranks]):
                process.send(job, rank)
            return collect(job.ranks, job.timeout_s, self._next_answer)
        except RankError as error:
            if error.status == "timeout":
                hung = [self._processes[rank].process.pid for rank in error.silent]
                error.log += stacks_of(self._folder, hung)
            raise
        finally:
            # also after Ctrl-C: no process may be left in the middle of a job
            if any(process.busy for process in self._processes):
                self._kill()

    def close(self) -> None:
        """End the processes; another job starts others."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _next_answer(self, waiting: Collection[int], timeout_s: float) -> Answer | None:
        by_connection = {self._processes[rank].connection: self._processes[rank] for rank in waiting}
        ready = wait(list(by_connection), timeout_s)
        return by_connection[ready[0]].receive() if ready else None  # type: ignore[index]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []


def loopback_store(port: int = 0) -> tuple[dist.TCPStore, int]:
    """A store that listens on the loopback interface alone, and its port; 0: one that the system chooses.

    A store that opens its socket itself listens on all interfaces.

    Raises:
        UserError: processes of this machine cannot reach each other there; ranks would wait for minutes.
    """
    try:
        listening = socket.create_server((_LOOPBACK, port))
        port = listening.getsockname()[1]
        with socket.create_connection((_LOOPBACK, port), _REACHED_S), listening.accept()[0]:
            pass
    except OSError as error:
        raise UserError(
            f"ranks cannot meet at {_LOOPBACK}:{port} ({error.strerror or error}); check that the loopback "
            "interface is up (ip link set lo up) and that the process may open files (ulimit -n)"
        ) from error
    store = dist.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port
