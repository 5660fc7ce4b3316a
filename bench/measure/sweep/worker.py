"""Worker processes for cells: started once, given one cell at a time, replaced when they die or hang.

Own code, since the pools of libraries do not serve: that of concurrent.futures breaks as a whole when one of
its processes is killed, and that of pebble kills a process without asking it and its ranks for their stacks.

A worker leads a process group that its ranks belong to, so that one signal reaches all of them. What they
print goes to a file, whose end becomes part of the row of a cell that failed.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.engine import engine_property
from spbench.bench.measure.engines.run_cell import Run, measure, run_cell
from spbench.bench.measure.processes.rank_job import fate
from spbench.bench.measure.processes.starting import (
    STACKS_FOLDER,
    Surroundings,
    interrupts_blocked,
    main_module_hidden,
    starting_context,
    when_parent_is_gone,
    write_stacks_on_signal,
    written_stacks,
)
from spbench.bench.measurement import Outcome, shortened

#: seconds that a worker has to end its own processes before it is killed
GRACE_S = 10.0

#: seconds that a worker has to import what it runs and take a cell; the cell's own limit begins after them
START_LIMIT_S = 300.0

#: a worker whose engine ends a cell at its limit is ended so many seconds later if the engine does not
LATER_S = 60.0

#: characters of what a worker printed that are kept in a row, from the end
LOG_LENGTH = 8000

#: in a worker's folder: what it printed, and a folder of stacks
_PRINTED, _STACKS = "printed", "stacks"


class Worker:
    """A process that runs cells with ``run``, which must be importable by its name.

    Attributes:
        cell: what it runs; None: it is idle.
        deadline: when its cell runs out of time, by time.monotonic; None: never.
        begun: whether it has taken its cell.
    """

    def __init__(self, run: Run):
        context = starting_context()
        self.connection, theirs = context.Pipe()
        self.folder = Path(tempfile.mkdtemp(prefix="spbench-worker-"))
        self._printed = 0
        # not a daemon: a cell of the distributed engine starts processes of its own
        arguments = (Surroundings(), theirs, pickle.dumps(run), self.folder)
        self.process = context.Process(target=_serve, args=arguments)  # type: ignore[attr-defined]
        with interrupts_blocked(), main_module_hidden():
            self.process.start()
        theirs.close()
        self.cell: Cell | None = None
        self.deadline: float | None = None
        self.begun = False

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def give(self, cell: Cell, run: Run | None = None) -> None:
        """Start a cell. The connection becomes ready as the cell begins, and as it ends.

        Args:
            run: runs this cell in place of the worker's own function.
        """
        self.cell, self.begun = cell, False
        self.deadline = time.monotonic() + START_LIMIT_S if cell.timeout_s else None
        with suppress(OSError):  # `take` finds out that it is dead
            self.connection.send((cell, run))

    def take(self) -> Outcome | None:
        """The outcome of its cell; failed, if the process has died; None: the cell has only begun."""
        assert self.cell is not None
        try:
            outcome = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(GRACE_S)
            more = "; try fewer --jobs" if self.process.exitcode == -signal.SIGKILL else ""
            outcome = Outcome("failed", f"the worker process {fate(self.process.exitcode)}{more}")
        if outcome is None:
            self.begun = True
            if self.cell.timeout_s:
                later = LATER_S if engine_property(self.cell.engine, "ends_in_time") else 0.0
                self.deadline = time.monotonic() + self.cell.timeout_s + later
            return None
        self.cell = self.deadline = None
        return self._with_log(outcome)

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def time_out(self) -> Outcome:
        """The outcome of a cell that has run out of time, with its processes' stacks. Call stop next."""
        assert self.cell is not None
        assert self.cell.timeout_s is not None
        reason = f"no end within its limit of {self.cell.timeout_s:g} s"
        if not self.begun:
            reason = f"its worker did not start within {START_LIMIT_S:g} s"
        outcome = self._with_log(Outcome("timeout", reason, elapsed_s=self.cell.timeout_s))
        self.cell = self.deadline = None
        return replace(outcome, log=outcome.log + self._stacks())

    def stop(self) -> None:
        """Tell the process and its children to end. Call reap next."""
        self.connection.close()
        self._signal(signal.SIGTERM)

    def reap(self) -> None:
        """Wait for the end of the process; kill it if it is slow, and what is left of its children."""
        self.process.join(GRACE_S)
        self._signal(signal.SIGKILL)
        self.process.join()
        self._pass_on_output()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        assert self.process.pid is not None
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # it has no group yet, or the whole group is gone
            with suppress(ProcessLookupError):
                if self.process.is_alive():
                    os.kill(self.process.pid, number)

    def _stacks(self) -> str:
        """The stacks of the worker and of its ranks, each under its name."""
        self._signal(signal.SIGUSR1)
        return written_stacks(self.folder / _STACKS)

    def _with_log(self, outcome: Outcome) -> Outcome:
        """The outcome; if it is no success, with the end of what was printed meanwhile."""
        printed = self._pass_on_output()
        if outcome.status not in ("failed", "timeout") and not outcome.log:
            return outcome
        last = printed.rstrip().rsplit("\n", 1)[-1].strip()
        reason = outcome.reason
        if last and not outcome.traceback and outcome.status == "failed":
            reason = shortened(f"{reason}; it printed last: {last}")
        return replace(outcome, reason=reason, log=printed[-LOG_LENGTH:] + outcome.log)

    def _pass_on_output(self) -> str:
        """What was printed since the last call, which also goes to standard error."""
        try:
            with (self.folder / _PRINTED).open("rb") as file:
                file.seek(self._printed)
                content = file.read()
        except OSError:  # the process died before it could print
            return ""
        self._printed += len(content)
        text = content.decode(errors="replace")
        sys.stderr.write(text)
        return text


def _serve(surroundings: Surroundings, connection: Connection, pickled_run: bytes, folder: Path) -> None:
    """Run cells until the pipe ends; the answer to each is None as it begins, then its outcome."""
    surroundings.take_on()
    os.setpgid(0, 0)  # for itself and its ranks
    printed = os.open(folder / _PRINTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    (folder / _STACKS).mkdir()
    os.environ[STACKS_FOLDER] = str(folder / _STACKS)
    write_stacks_on_signal("stacks of the worker")
    end = when_parent_is_gone(lambda: _end_all(folder))
    run = pickle.loads(pickled_run)  # here, so that an error of its import is in what is printed
    import torch

    from spbench.bench.measure.engines import trace_cache

    torch.set_num_threads(1)  # the workers share the cores
    trace_cache.use()
    with suppress(EOFError, OSError):
        while True:
            cell, other = connection.recv()
            connection.send(None)
            outcome = measure(other or run, cell)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(outcome)
    end.join(GRACE_S)  # if the parent is gone, the thread removes the folder


def _end_all(folder: Path) -> None:
    """End this process and its children, as its parent is gone; by SIGTERM first, so that an engine can end
    the processes that it has started."""
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


class Crew:
    """Workers that stay from sweep to sweep, so that each imports torch and fills its caches once.

    Leaving the context ends them all, whatever they do.
    """

    def __init__(self, run: Run = run_cell):
        self.run = run
        self.workers: list[Worker] = []

    def idle(self, at_most: int) -> Worker | None:
        """A worker without a cell, started if there is none; None: so many are busy already."""
        if sum(worker.cell is not None for worker in self.workers) >= at_most:
            return None
        for worker in [worker for worker in self.workers if worker.cell is None]:
            if worker.alive:
                return worker
            self._discard(worker)
        self.workers.append(Worker(self.run))
        return self.workers[-1]

    @property
    def busy(self) -> bool:
        return any(worker.cell is not None for worker in self.workers)

    def ended(self) -> list[tuple[Cell, Outcome]]:
        """Wait until workers end a cell, die or run out of time; return their cells with the outcomes."""
        outcomes: list[tuple[Cell, Outcome]] = []
        while not outcomes:
            busy = [worker for worker in self.workers if worker.cell is not None]
            deadlines = [worker.deadline for worker in busy if worker.deadline is not None]
            left = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            ready = wait([worker.connection for worker in busy], left)
            for worker in busy:
                cell, hung = worker.cell, False
                assert cell is not None
                outcome = worker.take() if worker.connection in ready else None
                if outcome is None and worker.out_of_time:
                    outcome, hung = worker.time_out(), True
                if outcome is not None:
                    outcomes.append((cell, outcome))
                    if hung or not worker.alive:
                        self._discard(worker)
        return outcomes

    def _discard(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.stop()
        worker.reap()

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
