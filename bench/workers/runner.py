"""A process that runs cells for a task of another program, which may not have worker processes of its own.

Schedulers of tasks run them in threads of processes that are daemons to multiprocessing, so that these may
not have children, and a thread cannot be ended. A runner is a program of its own below them: it has a
:class:`Crew` of one worker, in which cells have the memory, the time limit and the end that they have in a
sweep on one machine. It ends when the process that started it is gone, and with it all that it has started.

The protocol is pickles: on standard input the function that measures cells, pickled, then cells; on standard
output their outcomes.
"""

from __future__ import annotations

import os
import pickle
import platform
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from spbench.bench.ranks.processes import environment_of_child, fate
from spbench.bench.sweep.provenance import provenance
from spbench.bench.workers.crew import Crew
from spbench.bench.workers.executor import Parcel
from spbench.bench.workers.worker import Outcome

#: seconds without a cell after which a runner ends by itself: of a sweep that has vanished nothing stays
IDLE_LIMIT_S = 60.0

#: seconds between two looks whether a cell is still wanted
_LOOK_S = 0.5


class Runner:
    """A runner below this process.

    Args:
        run: the function that measures cells, pickled.
        environment: variables that it gets beside those of this process.
    """

    def __init__(self, run: bytes, environment: Mapping[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment_of_child(), **environment},
            start_new_session=True,  # Ctrl-C goes to this process, which decides
        )
        self._idle_since = time.monotonic()
        self._send(run)

    @property
    def usable(self) -> bool:
        """Whether it can be given a cell, and will not end by itself meanwhile."""
        idle_s = time.monotonic() - self._idle_since
        return self.process.poll() is None and idle_s < IDLE_LIMIT_S / 2

    def outcome(self, parcel: Parcel, wanted: Callable[[], bool]) -> Outcome | None:
        """Run a cell, and return its outcome; None once ``wanted`` says no, which is asked now and then.

        Where the runner dies, the outcome is failed. It cannot be used any more then, nor after None.
        """
        self._send(parcel)
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], _LOOK_S)[0]:
            if not wanted():
                return None
        try:
            found = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            found = Outcome("failed", f"the process that ran it {fate(self.process.wait())}")
        self._idle_since = time.monotonic()
        return found

    def end(self) -> None:
        """End it and what it has started, whatever they do."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _send(self, content: Any) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # a runner that is dead already is found out by `outcome`
            pickle.dump(content, self.process.stdin)
            self.process.stdin.flush()


def main() -> None:
    """The life of a runner. Not ended by the interpreter, which cannot end while a thread reads."""
    code = 0
    try:
        _serve_cells()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _serve_cells() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    folder = Path(tempfile.mkdtemp(prefix="spbench-runner-"))
    requests: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
    busy = threading.Event()
    run = pickle.loads(pickle.load(sys.stdin.buffer))
    threading.Thread(target=_read, args=(requests, busy, folder), daemon=True).start()
    with Crew(run) as crew, suppress(queue.Empty):
        while (parcel := requests.get(timeout=IDLE_LIMIT_S)) is not None:
            busy.set()
            pickle.dump(_outcome(parcel, crew, folder), answers)
            answers.flush()
            busy.clear()
    shutil.rmtree(folder, ignore_errors=True)


def _read(requests: queue.SimpleQueue[Parcel | None], busy: threading.Event, folder: Path) -> None:
    """Pass on what comes. When the one that sends is gone, this process ends: as it should if it is idle, and
    at once if a cell is running, whose processes see that, and end too."""
    with suppress(EOFError):
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    requests.put(None)
    busy.wait()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _outcome(parcel: Parcel, crew: Crew, folder: Path) -> Outcome:
    """As :func:`run_parcel`; what goes wrong with this machine (a full disk, no more processes) is one."""
    try:
        return run_parcel(parcel, crew, folder)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome("failed", f"{reason}, on {platform.node()}", traceback=traceback.format_exc())


def run_parcel(parcel: Parcel, crew: Crew, folder: Path) -> Outcome:
    """Run a cell on a crew of this machine, on the cluster that came with it.

    Args:
        folder: in which the cluster's file is written.

    Returns its outcome, which says where it ran.
    """
    path = folder / f"{parcel.cluster}.yaml"
    path.write_text(parcel.figures)
    worker = crew.idle(1)
    assert worker is not None, "a runner has one cell at a time"
    worker.give(parcel.cell.model_copy(update={"cluster": str(path)}))
    ((_, outcome),) = crew.ended()
    reason = outcome.reason.replace(str(path), parcel.cell.cluster)
    return replace(outcome, reason=reason, provenance=provenance())


if __name__ == "__main__":
    main()
