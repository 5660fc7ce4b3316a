"""Real ranks on this machine: long-lived Gloo processes that run one job after another.

The processes are started once, and each job makes a process group of its own on as many as it needs.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from spbench.bench.processes import Surroundings, end_with_parent, main_module_hidden, starting_context
from spbench.impls.axes import device_mesh, whole_mesh

_HOST = "127.0.0.1"
#: after one rank failed, the time that the others have to notice it before they are killed
_GRACE_S = 5.0


class RankError(RuntimeError):
    """A rank raised, died or did not answer; the text holds the rank and its traceback."""

    def __init__(self, rank: int, what: str):
        super().__init__(f"rank {rank}: {what}")
        self.rank = rank


class RankPool:
    """Worker processes that act as the ranks of one process group after another.

    Use it as a context manager, or call :meth:`close`. The workers also end when this process does,
    however it ends.

    Args:
        size: the largest number of ranks that a job can have.
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"a pool needs at least 1 rank, not {size}")
        self.size = size
        self._jobs = itertools.count()
        self._workers: list[_Worker] = []
        # port 0: the system chooses a free one
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        sizes: Mapping[str, int],
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
    ) -> list[Any]:
        """Call ``function(mesh, *args)`` on every rank of a mesh; returns what each returned, by rank.

        Args:
            sizes: ranks along each axis of the mesh; axes that are left out have 1.
            function: of a module that the workers can import; its arguments and result are pickled.
            timeout_s: after it the job has failed and the workers are killed; the next job gets new ones.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
            ValueError: the mesh has no such axis, or more ranks than the pool.
        """
        whole = whole_mesh(sizes)
        n = math.prod(whole.values())
        if n > self.size:
            raise ValueError(f"a job on {n} ranks does not fit in a pool of {self.size}")
        # pickled here, so that what cannot be pickled is the caller's error and reaches no worker
        work = pickle.dumps((function, args))
        job = next(self._jobs)
        while len(self._workers) < self.size:
            self._workers.append(_Worker(self._store.port))
        try:
            for rank, worker in enumerate(self._workers[:n]):
                worker.send((job, rank, whole, timeout_s, work))
            return self._collect(n, timeout_s)
        except BaseException:  # also Ctrl-C: no worker may be left in the middle of a job
            if any(worker.busy for worker in self._workers):
                self._kill()
            raise

    def close(self) -> None:
        """End the workers."""
        self._kill()

    def _collect(self, n: int, timeout_s: float) -> list[Any]:
        results: list[Any] = [None] * n
        failures: list[tuple[int, int, str]] = []  # place in the order of failing, rank, what happened
        waiting = dict(enumerate(self._workers[:n]))
        deadline = time.monotonic() + timeout_s
        while waiting:
            readable = wait([w.connection for w in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not readable:
                break
            for rank, worker in list(waiting.items()):
                if worker.connection not in readable:
                    continue
                del waiting[rank]
                try:
                    place, value = worker.receive()
                except (EOFError, OSError):
                    worker.process.join(_GRACE_S)
                    place, value = 0, f"the process died with exit code {worker.process.exitcode}"
                if place is None:
                    results[rank] = value
                    continue
                failures.append((place, rank, value))
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:  # the first to fail is the cause, later ones are the consequence
            _, rank, what = min(failures)
            raise RankError(rank, what)
        if waiting:
            silent = ", ".join(map(str, waiting))
            raise RankError(min(waiting), f"no answer after {timeout_s:g} s (from {silent})")
        return results

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []


class _Worker:
    """This process's end of one worker; ``busy`` while an answer is owed."""

    def __init__(self, port: int):
        context = starting_context()
        self.connection, theirs = context.Pipe()
        # daemon: ended by multiprocessing when this process exits
        arguments = (Surroundings(), theirs, port)
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        with main_module_hidden():
            self.process.start()
        theirs.close()  # so that the death of the worker reads as the end of the pipe
        self.busy = False

    def send(self, job: Any) -> None:
        self.busy = True
        with contextlib.suppress(BrokenPipeError):  # a dead worker is reported by receive
            self.connection.send_bytes(pickle.dumps(job))

    def receive(self) -> tuple[int | None, Any]:
        """(None, result), or (place in the order of failing, what happened).

        Raises:
            EOFError, OSError: the worker is dead.
        """
        answer = pickle.loads(self.connection.recv_bytes())
        self.busy = False
        return answer

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _serve(surroundings: Surroundings, connection: Connection, port: int) -> None:
    """The life of a worker: jobs until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent()
    surroundings.take_on()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore(_HOST, port, is_master=False)
    gc.freeze()  # so that to look for garbage after a job takes milliseconds
    while True:
        try:
            job, rank, sizes, timeout_s, work = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((None, _run_job(store, job, rank, sizes, timeout_s, work)))
        except BaseException:
            # counted before the group is destroyed, and so before other ranks fail for that reason
            answer = pickle.dumps((store.add(f"failures{job}", 1), traceback.format_exc()))
        if dist.is_initialized():
            # also closes the connections, so that ranks that wait for this one fail too
            dist.destroy_process_group()
        # groups over several axes and the device mesh refer to each other, and so do tracebacks and what
        # they have seen; a group that is left over keeps a thread of Gloo that wakes up every 10 ms
        gc.collect()
        connection.send_bytes(answer)


def _run_job(
    store: dist.Store, job: int, rank: int, sizes: dict[str, int], timeout_s: float, work: bytes
) -> Any:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"job{job}", store),
        rank=rank,
        world_size=math.prod(sizes.values()),
        timeout=timedelta(seconds=timeout_s),
    )
    mesh = device_mesh(sizes)
    function, args = pickle.loads(work)
    return function(mesh, *args)
