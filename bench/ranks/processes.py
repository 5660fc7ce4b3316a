"""What the processes that run cells share, workers and ranks: how they start, cores, and stacks on demand.

On Linux they are forked from a server (the start method forkserver of multiprocessing), a process that has
imported what a cell needs and does nothing else: a process with torch is there in milliseconds instead of
seconds. The server has a single thread, so that a fork is safe: it imports, and computes nothing.
Elsewhere, where system libraries do not bear a fork, each process is spawned and imports everything itself.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Literal

#: of the environment: the folder into which a worker and its ranks write their stacks
STACKS_FOLDER = "SPBENCH_STACKS_FOLDER"

#: how processes are started, for multiprocessing and for torchrun's launcher
START_METHOD: Literal["forkserver", "spawn"] = "forkserver" if sys.platform == "linux" else "spawn"

#: seconds in which processes write their stacks, at most
STACKS_S = 6.0

#: what the server imports
_PRELOADED = "spbench.bench.engines.preloaded"

#: the environment with which this process has started, or which the server had when it was forked
_environment_at_start = dict(os.environ)


def usable_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def starting_context() -> BaseContext:
    """The multiprocessing context of :data:`START_METHOD`; where that is a server, it is running and ready.

    Waits for the server's imports at the first call of a process, for seconds, during which an interrupt is
    safe. Processes of the context hide the main module of this one (:func:`main_module_hidden`) only if they
    are started inside of that.
    """
    context = multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        with interrupts_blocked(), _environment_of_server():
            forkserver.set_forkserver_preload([_PRELOADED])
            forkserver.ensure_running()
        first = context.Process(target=_do_nothing)  # type: ignore[attr-defined]
        with main_module_hidden():
            first.start()
        first.join()
    return context


def _do_nothing() -> None:
    """The first process of a server, which exists once the server is ready."""


def environment_of_child() -> dict[str, str]:
    """Variables with which a Python process finds modules where this one finds them, and never in the folder
    it is in, and has no threads for linear algebra."""
    return {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONSAFEPATH": "1",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's would start its threads as it is imported
    }


@contextmanager
def _environment_of_server() -> Iterator[None]:
    """What is started inside has :func:`environment_of_child`."""
    changed = environment_of_child()
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def server_is_ready() -> None:
    """For the server, after its imports: what they have set in the environment is no launcher's."""
    global _environment_at_start
    _environment_at_start = dict(os.environ)


@dataclass(frozen=True)
class Surroundings:
    """What a process has from the one that starts it, and one that is forked from a server would have from
    the server instead, as it was when that started: environment, usable cores and limits of resources."""

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cores: frozenset[int] = field(default_factory=lambda: _cores())
    limits: dict[int, tuple[int, int]] = field(default_factory=lambda: _limits())

    def take_on(self) -> None:
        """Give them to this process. What a launcher has put into its environment since it began stays."""
        of_launcher = {
            name: value for name, value in os.environ.items() if _environment_at_start.get(name) != value
        }
        os.environ.clear()
        os.environ.update(self.environment | of_launcher)
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        if self.limits:
            import resource

            for limit, values in self.limits.items():
                with suppress(ValueError, OSError):  # above what the server has itself
                    resource.setrlimit(limit, values)


def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _limits() -> dict[int, tuple[int, int]]:
    if START_METHOD != "forkserver":
        return {}
    import resource

    every = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {limit: resource.getrlimit(limit) for limit in every}


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A process started inside never sees Ctrl-C, which goes to all processes of a terminal; this process
    gets it afterwards, and ends the other."""
    resource_tracker.ensure_running()  # or else the first start does it, and unblocks signals behind our back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """From now on this process ends at once when the one that has started it is gone, however that ended."""
    threading.Thread(target=_wait_for_end_of_parent, daemon=True).start()


def _wait_for_end_of_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def write_stacks_on_signal(name: str) -> None:
    """From now on SIGUSR1 makes this process write the stacks of all its threads, and go on.

    They go to the file ``name`` in the folder that the environment names by :data:`STACKS_FOLDER`; without
    it nothing is changed. The handler is C code, so it answers while a thread waits inside a library.
    """
    if folder := os.environ.get(STACKS_FOLDER):
        # stays open for as long as the process lives
        descriptor = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        faulthandler.register(signal.SIGUSR1, descriptor, all_threads=True, chain=False)


def stacks_of(folder: Path, pids: Iterable[int | None]) -> str:
    """The stacks of processes that write them into that folder on a signal, each file under its name; then,
    where py-spy is installed, what it sees, which names the lines of Python below C code.

    Takes up to twice :data:`STACKS_S` seconds.
    """
    living = [pid for pid in pids if pid is not None]
    found = ""
    # one after the other: the stacks of a thread that runs are written while they change
    for times, number in enumerate((signal.SIGUSR1, signal.SIGUSR2), start=1):
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        found = written_stacks(folder, times * len(living))
    return found + "".join(_seen_by_py_spy(pid) for pid in living)


def written_stacks(folder: Path, files: int = 1) -> str:
    """The files of a folder into which processes that have been signalled write, each under its name.

    Args:
        files: how many there are to be at least; they are waited for, and until nothing more is written, for
            up to :data:`STACKS_S` seconds.
    """
    deadline, before, now = time.monotonic() + STACKS_S, [-1], [0]
    while time.monotonic() < deadline and not (len(now) >= files and now == before and all(now)):
        time.sleep(STACKS_S / 20)
        before, now = now, [file.stat().st_size for file in _files(folder)]
    texts = {file.name: file.read_text(errors="replace") for file in _files(folder)}
    return "".join(f"-- {name} --\n{text.rstrip()}\n" for name, text in texts.items() if text)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _seen_by_py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        seen = subprocess.run(command, capture_output=True, text=True, timeout=STACKS_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # mostly that it may not look into the process
        return ""
    return f"-- process {pid} as py-spy sees it --\n{seen.rstrip()}\n"


def fate(exitcode: int | None) -> str:
    """How a process ended, as the rest of a sentence."""
    if exitcode is None or exitcode >= 0:
        return f"ended by itself with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    guess = " (was the machine out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{guess}"


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """A process that multiprocessing starts inside does not import the main module of this one.

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
