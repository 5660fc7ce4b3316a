"""What the processes that run cells share, workers and ranks: how they start, cores, and stacks on demand."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

#: of the environment: the folder into which a worker and its ranks write their stacks
STACKS_FOLDER = "SPBENCH_STACKS_FOLDER"


def usable_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_stacks_on_signal(who: str) -> None:
    """From now on SIGUSR1 makes this process write the stacks of all its threads, and go on.

    They go to the file ``who`` in the folder that the environment names by :data:`STACKS_FOLDER`; without
    it nothing is changed. The handler is C code, so it answers while a thread waits inside a library.
    """
    if folder := os.environ.get(STACKS_FOLDER):
        # stays open for as long as the process lives
        descriptor = os.open(Path(folder, who), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        faulthandler.register(signal.SIGUSR1, descriptor, all_threads=True, chain=False)


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """A process that multiprocessing spawns inside does not import the main module of this one.

    What the process needs must be in other modules. A script may then call for processes without a guard
    ``if __name__ == "__main__"``, and is not run once more for each of them. The bare main module has neither
    a spec nor a file, by which multiprocessing would find it, as in an interactive session.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
