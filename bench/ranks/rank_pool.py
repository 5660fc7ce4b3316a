"""Real ranks on this machine: long-lived processes that run one job after another.

The processes are started once, and each job makes a process group of its own on as many as it needs.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spbench.bench.ranks.processes import STACKS_FOLDER, stacks_of
from spbench.bench.ranks.rank_job import Answer, Job, RankError, collect
from spbench.bench.ranks.rank_process import RankProcess, Rendezvous
from spbench.bench.ranks.ranks import Ranks

__all__ = ["RankError", "RankPool"]

_HOST = "127.0.0.1"


class RankPool(Ranks):
    """Processes of this machine that act as the ranks of one process group after another.

    Use it as a context manager, or call :meth:`close`. The processes also end when this one does, however it
    ends.

    Args:
        size: the largest number of ranks that a job can have.
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"a pool needs at least 1 rank, not {size}")
        self.size = size
        self._jobs = itertools.count()
        self._processes: list[RankProcess] = []
        # port 0: the system chooses a free one
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        # within that of a sweep's worker, which asks for stacks too
        self._folder = Path(tempfile.mkdtemp(prefix="spbench-ranks-", dir=os.environ.get(STACKS_FOLDER)))
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self._environment = {"GLOO_SOCKET_IFNAME": loopback, **os.environ, STACKS_FOLDER: str(self._folder)}

    def _run(self, job: Job) -> list[Any]:
        job = replace(job, number=next(self._jobs))
        n = job.ranks
        self._folder.mkdir(mode=0o700, exist_ok=True)  # of a pool that was closed it is gone
        while len(self._processes) < self.size:
            place = Rendezvous(_HOST, self._store.port)
            self._processes.append(RankProcess(place, len(self._processes), self._environment))
        try:
            for rank, process in enumerate(self._processes[:n]):
                process.send(job, rank)
            return collect(n, job.timeout_s, self._next_answer)
        except RankError as error:
            hung = [self._processes[rank] for rank in error.silent] if error.status == "timeout" else []
            if hung:
                error.log += stacks_of(self._folder, [process.process.pid for process in hung])
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
