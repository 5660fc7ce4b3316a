"""A program that runs cells for tasks of a scheduler such as Dask.

Schedulers run tasks in threads, which cannot be ended, of processes that may have no children. A runner is a
program below such a process: it has a :class:`Crew` of one worker, so that cells have the memory, the time
limit and the end that they have in a sweep on one machine. It ends, with all its children, when the process
that started it is gone.

It reads pickles from standard input (the function that measures cells, then cells) and writes the pickled
outcomes to standard output.
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

from spbench.bench.measure.processes.rank_job import fate
from spbench.bench.measure.processes.starting import environment_of_child
from spbench.bench.measure.sweep.executor import Parcel
from spbench.bench.measure.sweep.provenance import provenance
from spbench.bench.measure.sweep.worker import Crew
from spbench.bench.measurement import Outcome

#: seconds without a cell after which a runner ends by itself, as its sweep may have vanished
IDLE_LIMIT_S = 60.0

#: seconds between two looks whether a cell is still wanted
_LOOK_S = 0.5


class Runner:
    """A runner below this process.

    Args:
        run: the function that measures cells, pickled.
        environment: variables beside those of this process.
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
        """Whether it lives, and will not end by itself before a cell reaches it."""
        idle_s = time.monotonic() - self._idle_since
        return self.process.poll() is None and idle_s < IDLE_LIMIT_S / 2

    def outcome(self, parcel: Parcel, wanted: Callable[[], bool]) -> Outcome | None:
        """Run a cell, and return its outcome: failed, if the runner dies; None, once ``wanted`` says no.

        A runner that has died or returned None cannot be used any more.
        """
        self._send(parcel)
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], _LOOK_S)[0]:
            if not wanted():
                return None
        try:
            outcome = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            outcome = Outcome("failed", f"the process that ran it {fate(self.process.wait())}")
        self._idle_since = time.monotonic()
        return outcome

    def end(self) -> None:
        """End it and its children, whatever they do."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _send(self, content: Any) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # `outcome` finds out that it is dead
            pickle.dump(content, self.process.stdin)
            self.process.stdin.flush()


def main() -> None:
    """Run cells until nobody sends any. The interpreter itself could not end while a thread reads."""
    code = 0
    try:
        _serve_cells()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _serve_cells() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what cells print goes elsewhere
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
    """Pass requests on. When the sender is gone, an idle runner ends its crew; one with a cell exits at once,
    and its worker ends with it."""
    with suppress(EOFError):
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    requests.put(None)
    busy.wait()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _outcome(parcel: Parcel, crew: Crew, folder: Path) -> Outcome:
    """As :func:`run_parcel`; failed, if this machine cannot run it (a full disk, no more processes)."""
    try:
        return run_parcel(parcel, crew, folder)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome("failed", f"{reason}, on {platform.node()}", traceback=traceback.format_exc())


def run_parcel(parcel: Parcel, crew: Crew, folder: Path) -> Outcome:
    """Run a cell on a crew, with the cluster that came with it, whose file is written into ``folder``.

    Returns the outcome, with the provenance of this machine.
    """
    path = folder / f"{parcel.cluster}.yaml"
    path.write_text(parcel.content, encoding="utf-8")
    worker = crew.idle(1)
    assert worker is not None, "a runner has one cell at a time"
    worker.give(parcel.cell.model_copy(update={"cluster": str(path)}))
    ((_, outcome),) = crew.ended()
    reason = outcome.reason.replace(str(path), parcel.cell.cluster)
    return replace(outcome, reason=reason, provenance=provenance())


if __name__ == "__main__":
    main()
