"""Worker processes for cells: started once, given one cell at a time, replaced when they die.

A worker of one's own rather than a pool of the standard library, because a pool breaks as a whole when
one of its processes is killed, and cannot say which cell did it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from spbench.bench.cell import Cell, Measurement, Status
from spbench.bench.process_start import main_module_hidden
from spbench.impls.strategies.base import Unsupported

#: seconds that a worker has to end its own processes before it is killed
GRACE_S = 10.0

#: characters of a reason; the whole text is in the traceback
REASON_LENGTH = 300

Run = Callable[[Cell], Measurement]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell; ``traceback`` only where it failed."""

    status: Status
    reason: str = ""
    measurement: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""
    elapsed_s: float | None = None


def measure(run: Run, cell: Cell) -> Outcome:
    """Run a cell; whatever it raises becomes an outcome."""
    start = time.perf_counter()
    try:
        found = run(cell)
        outcome = Outcome(found.status, found.reason, found.as_dict())
    except Unsupported as error:
        outcome = Outcome("unsupported", str(error))
    except (Exception, SystemExit) as error:
        reason = _shortened(" ".join(f"{type(error).__name__}: {error}".split()))
        outcome = Outcome("failed", reason, traceback=traceback.format_exc())
    return Outcome(**{**vars(outcome), "elapsed_s": time.perf_counter() - start})


def _shortened(text: str) -> str:
    """One line for a table; launchers of processes put whole reports into an error, the cause at its end."""
    return (
        text
        if len(text) <= REASON_LENGTH
        else f"{text[: REASON_LENGTH // 3]} ... {text[-REASON_LENGTH // 2 :]}"
    )


class Worker:
    """A process that runs cells with ``run``, which must be importable by its name."""

    def __init__(self, run: Run):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # not a daemon: a cell of the distributed engine starts processes of its own
        self.process = context.Process(target=_serve, args=(theirs, run))
        with _interrupts_blocked(), main_module_hidden():
            self.process.start()
        theirs.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell) -> None:
        """Start a cell; the connection is ready when it has ended."""
        self.cell = cell
        with suppress(OSError):  # a worker that is dead already is found out by `take`
            self.connection.send(cell)

    def take(self) -> Outcome:
        """The outcome of the cell given; failed, if the process died of it."""
        self.cell = None
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(GRACE_S)
            return Outcome("failed", f"the worker process {_fate(self.process.exitcode)}")

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def stop(self) -> None:
        """Tell the process to end, whatever it does; its own children end with it. Follow with reap."""
        self.connection.close()
        self.process.terminate()

    def reap(self) -> None:
        """Wait for the end of the process, and make it end if it is slow."""
        self.process.join(GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Crew:
    """Workers that stay from sweep to sweep, so that importing torch and filling its caches is paid once.

    Leaving it as a context ends them all, whatever they do.
    """

    def __init__(self, run: Run):
        self.run = run
        self.workers: list[Worker] = []

    def idle(self, at_most: int) -> Worker | None:
        """A worker without a cell, started if there are fewer than that; None: that many are busy."""
        if sum(worker.cell is not None for worker in self.workers) >= at_most:
            return None
        for worker in self.workers:
            if worker.cell is None:
                return worker
        self.workers.append(Worker(self.run))
        return self.workers[-1]

    @property
    def busy(self) -> bool:
        return any(worker.cell is not None for worker in self.workers)

    def ended(self) -> list[tuple[Cell, Outcome]]:
        """Wait for busy workers to end a cell or to die; what became of their cells."""
        by_connection = {worker.connection: worker for worker in self.workers if worker.cell is not None}
        found = []
        for ready in wait(list(by_connection)):
            assert isinstance(ready, Connection)
            worker = by_connection[ready]
            assert worker.cell is not None
            found.append((worker.cell, worker.take()))
            if not worker.alive:
                self.workers.remove(worker)
                worker.stop()
                worker.reap()
        return found

    def dismiss(self) -> None:
        """End all workers."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.reap()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.dismiss()


def _fate(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended by itself with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    guess = " (was the machine out of memory? try fewer --jobs)" if name == "SIGKILL" else ""
    return f"was killed by {name}{guess}"


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process started inside never sees Ctrl-C, which goes to all processes of a terminal; this process
    gets it afterwards, and ends the other."""
    resource_tracker.ensure_running()  # or else the first start does it, and unblocks signals behind our back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, run: Run) -> None:
    os.dup2(2, 1)  # standard output belongs to the results
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)  # the workers share the cores
    with suppress(EOFError, OSError):
        while True:
            outcome = measure(run, connection.recv())
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's launcher leaves its own handler behind
            connection.send(outcome)


def _end_with_parent() -> None:
    """End this process when its parent is gone, even by kill -9: terminated first, so that an engine can
    end the processes that it has started."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
