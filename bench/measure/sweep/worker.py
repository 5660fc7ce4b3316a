"""Worker processes for cells: started once, given one cell at a time, replaced when they die or hang.

Pools of libraries do not serve: concurrent.futures's breaks as a whole when one of its processes is killed,
and pebble's kills a process without asking the process and its ranks for their stacks.

A worker leads a process group that its ranks belong to, so that one signal reaches all of them. Their output
goes to a file, whose end becomes part of the row of a failed cell.
"""

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.engine import engine_class
from spbench.bench.measure.engines.run_cell import Run, measure
from spbench.bench.measure.processes import stacks
from spbench.bench.measure.processes.child import Child, ChildGone, requests, when_parent_is_gone
from spbench.bench.measurement import Outcome, shortened

#: seconds that a worker has to end its own processes before it is killed
GRACE_S = 10.0

#: seconds that a worker has to import its code and take a cell; the cell's own limit begins afterwards
START_LIMIT_S = 300.0

#: seconds after a cell's limit at which a worker is ended if its engine has not ended the cell itself
LATER_S = 60.0

#: characters of what a worker printed that are kept in a row, from the end
LOG_LENGTH = 8000

#: the names of the file of output and of the folder of stacks, in a worker's folder
_PRINTED, _STACKS = "printed", "stacks"


class Worker(Child):
    """A process that runs cells.

    Args:
        environment: variables of the process; None: those of this process.

    Attributes:
        cell: the cell that it runs; None: the worker is idle.
        deadline: when its cell runs out of time, by time.monotonic; None: never.
        begun: whether it has taken its cell.
        hung: whether a cell has run out of time.
        folder: holds the files of the process; removed when it ends.
    """

    def __init__(self, environment: Mapping[str, str] | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="spbench-worker-"))
        try:
            super().__init__(_serve_cells, self.folder, environment=environment, leads_group=True)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._printed = 0
        self.cell: Cell | None = None
        self.deadline: float | None = None
        self.begun = self.hung = False

    def give(self, cell: Cell, run: Run | bytes) -> None:
        """Start a cell. The connection becomes ready when the cell begins, and again when the cell ends.

        Args:
            run: the function that measures the cell; pickled if only the worker is to import its module.
        """
        self.cell, self.begun = cell, False
        self.deadline = time.monotonic() + START_LIMIT_S if cell.timeout_s else None
        self.send((cell, run if isinstance(run, bytes) else pickle.dumps(run)))

    def outcome(self, seconds: float = 0.0) -> Outcome | None:
        """The outcome of the worker's cell; None: the cell does not end within ``seconds``. The status is
        "failed" if the process has died, "timeout", with stacks, if the cell's time is over."""
        outcome = self._received() if self.connection.poll(seconds) else None
        if outcome is None and self.deadline is not None and time.monotonic() >= self.deadline:
            outcome, self.hung = self._timed_out(), True
        if outcome is not None:
            self.cell = self.deadline = None
        return outcome

    @property
    def usable(self) -> bool:
        """Whether the worker can take another cell."""
        return self.alive and not self.hung

    def _received(self) -> Outcome | None:
        """The outcome that the worker has sent; None if it says that the cell has begun."""
        assert self.cell is not None
        try:
            outcome: Outcome | None = self.receive()
        except ChildGone as gone:
            more = "; try fewer --jobs" if self.process.exitcode == -signal.SIGKILL else ""
            outcome = Outcome("failed", f"the worker process {gone}{more}")
        if outcome is not None:
            return self._with_log(outcome)
        self.begun = True
        if self.cell.timeout_s:
            later = LATER_S if engine_class(self.cell.engine).ends_in_time else 0.0
            self.deadline = time.monotonic() + self.cell.timeout_s + later
        return None

    def _timed_out(self) -> Outcome:
        assert self.cell is not None
        assert self.cell.timeout_s is not None
        reason = f"{stacks.NO_END} {self.cell.timeout_s:g} s"
        if not self.begun:
            reason = f"its worker did not start within {START_LIMIT_S:g} s"
        outcome = self._with_log(Outcome("timeout", reason, elapsed_s=self.cell.timeout_s))
        self.signal(signal.SIGUSR1)
        return replace(outcome, log=outcome.log + stacks.written_stacks(self.folder / _STACKS))

    def end(self, grace_s: float = GRACE_S) -> None:
        """Wait ``grace_s`` seconds for the end, then kill the process and its children; remove its folder."""
        super().end(grace_s)
        self._pass_on_output()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _with_log(self, outcome: Outcome) -> Outcome:
        """The outcome; for a cell that failed or ran out of time, with the end of its output as the log."""
        printed = self._pass_on_output()
        if outcome.status not in ("failed", "timeout") and not outcome.log:
            return outcome
        last = printed.rstrip().rsplit("\n", 1)[-1].strip()
        reason = outcome.reason
        if last and not outcome.traceback and outcome.status == "failed":
            reason = shortened(f"{reason}; it printed last: {last}")
        return replace(outcome, reason=reason, log=printed[-LOG_LENGTH:] + outcome.log)

    def _pass_on_output(self) -> str:
        """Write the process's output since the last call to standard error; returns that output."""
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


def end_workers(workers: Sequence[Worker]) -> None:
    """End workers: all are told to end before the first is waited for."""
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.end()


def _serve_cells(connection: Connection, folder: Path) -> None:
    """Run cells in the worker's process; sends None when a cell begins, then its outcome."""
    printed = os.open(folder / _PRINTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    (folder / _STACKS).mkdir()
    os.environ[stacks.STACKS_FOLDER] = str(folder / _STACKS)
    stacks.write_stacks_on_signal("stacks of the worker")
    end = when_parent_is_gone(lambda: _end_all(folder))
    import torch

    from spbench.bench.measure.engines import traces

    torch.set_num_threads(1)  # the workers share the cores
    with traces.keeping_traces(), suppress(ConnectionError):
        for cell, pickled_run in requests(connection):
            run = pickle.loads(pickled_run)  # here, so that an error of its import is in what is printed
            connection.send_bytes(pickle.dumps(None))
            outcome = measure(run, cell)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(pickle.dumps(outcome))
    end.join(GRACE_S)  # if the parent is gone, the thread removes the folder


def _end_all(folder: Path) -> None:
    """End this process and its children because its parent is gone; by SIGTERM first, so that an engine can
    end the processes that it has started."""
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


class Crew(AbstractContextManager["Crew"]):
    """Workers that stay from sweep to sweep, so that each imports torch and fills its caches once.

    Leaving the context ends all workers, even busy ones.
    """

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def outcomes(
        self,
        tasks: Iterable[tuple[Cell, Run]],
        at_once: int,
        on_start: Callable[[Cell], None] = lambda cell: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[Cell, Outcome]]:
        """Start cells in this order, at most ``at_once`` at a time; yield each with its outcome as it ends.

        Args:
            tasks: cells, each with the function, of a module, that measures it.
            on_start: called as a cell begins.
            enough: called before a cell begins; if it returns True, no further cell begins.
        """
        waiting = deque(tasks)
        while (waiting and not enough()) or self._busy:
            while waiting and not enough() and (worker := self._idle(at_once)) is not None:
                cell, run = waiting.popleft()
                on_start(cell)
                worker.give(cell, run)
            yield from self._ended()

    def _idle(self, at_once: int) -> Worker | None:
        """A worker without a cell, started if there is none; None if ``at_once`` workers are busy."""
        if len(self._busy) >= at_once:
            return None
        for worker in [worker for worker in self.workers if worker.cell is None]:
            if worker.usable:
                return worker
            self._discard(worker)
        self.workers.append(Worker())
        return self.workers[-1]

    @property
    def _busy(self) -> list[Worker]:
        """The workers that have a cell."""
        return [worker for worker in self.workers if worker.cell is not None]

    def _ended(self) -> list[tuple[Cell, Outcome]]:
        """Wait until workers end a cell, die or run out of time; return their cells with the outcomes."""
        outcomes: list[tuple[Cell, Outcome]] = []
        while not outcomes:
            busy = self._busy
            deadlines = [worker.deadline for worker in busy if worker.deadline is not None]
            left = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            wait([worker.connection for worker in busy], left)
            for worker in busy:
                cell = worker.cell
                if cell is not None and (outcome := worker.outcome()) is not None:
                    outcomes.append((cell, outcome))
                    if not worker.usable:
                        self._discard(worker)
        return outcomes

    def _discard(self, worker: Worker) -> None:
        self.workers.remove(worker)
        end_workers([worker])

    def dismiss(self) -> None:
        """End all workers."""
        workers, self.workers = self.workers, []
        end_workers(workers)

    def __exit__(self, *error: object) -> None:
        self.dismiss()
