"""What workers and ranks share as processes: how they start, their cores, and their stacks on demand.

On Linux they are forked from a server (multiprocessing's start method forkserver), which has imported what a
cell needs and does nothing else. A process with torch is then there in milliseconds instead of seconds. The
server has one thread, so that a fork is safe. Where system libraries do not bear a fork, as on macOS, each
process is spawned and imports everything itself.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from spbench.bench.errors import UserError
from spbench.bench.measure.processes.start_failures import limits_of_process, no_process

#: of the environment: the folder into which a worker and its ranks write their stacks
STACKS_FOLDER = "SPBENCH_STACKS_FOLDER"

#: how processes are started, for multiprocessing and for torchrun's launcher
START_METHOD: Literal["forkserver", "spawn"] = "forkserver" if sys.platform == "linux" else "spawn"

#: seconds that processes have to write their stacks
STACKS_S = 6.0

#: what the server imports first and last
_PRELOADED, _SERVER = "spbench.bench.measure.processes.preloaded", "spbench.bench.measure.processes.server"

#: a socket's path may have 107 bytes; multiprocessing puts sockets in a folder below the temporary one
_LONGEST_TEMPORARY_FOLDER = 60

#: the environment with which this process has started, or which the server had when it was forked
_environment_at_start = dict(os.environ)

#: whether this process uses the server that it was forked from
_server_is_shared = False


def usable_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(_cores()) or os.cpu_count() or 1


def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def begin_server() -> None:
    """Let the server import what it needs while this process goes on, where there is one."""
    if START_METHOD == "forkserver" and not _server_is_shared:
        with suppress(OSError):  # raised again where a process is started
            _run_server()


def _run_server() -> None:
    _make_folder_of_sockets()
    with interrupts_blocked(), environment_with(environment_of_child()):
        forkserver.set_forkserver_preload([_PRELOADED, _SERVER])
        forkserver.ensure_running()


def starting_context() -> BaseContext:
    """The multiprocessing context of :data:`START_METHOD`, with its server running and ready.

    The first call of a process waits seconds for the server's imports; an interrupt is safe meanwhile.
    Start processes inside of :func:`main_module_hidden`.

    Raises:
        UserError: the server cannot start, mostly for want of memory or of room for its socket.
    """
    context = multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        try:
            if not _server_is_shared:
                _run_server()
            first = context.Process(target=_do_nothing)  # type: ignore[attr-defined]
            with main_module_hidden():
                first.start()
        except (OSError, EOFError, MemoryError) as error:
            server: Any = forkserver._forkserver
            pid = None if _server_is_shared else server._forkserver_pid
            raise UserError(no_process(error, pid)) from error
        first.join()
    return context


def _do_nothing() -> None:
    """Also the first process of a server, which ends once the server has imported all."""


# multiprocessing would have each process start a server of its own, with seconds of imports; from Python 3.14
# on, where servers have keys, it does
def _server_address() -> str:
    server = getattr(forkserver, "_forkserver", None)
    return (
        "" if hasattr(server, "_forkserver_authkey") else getattr(server, "_forkserver_address", None) or ""
    )


def _share_server(address: str) -> None:
    """Have this process, which was forked from the server at that address, start its own processes there."""
    global _server_is_shared
    if address:
        server: Any = forkserver._forkserver
        server._forkserver_address, server.ensure_running = address, _do_nothing
        _server_is_shared = True


def _make_folder_of_sockets() -> None:
    """Have multiprocessing make its folder in /tmp if the temporary folder's path is too long for sockets."""
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TEMPORARY_FOLDER and os.access("/tmp", os.W_OK):
        long, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = long


def environment_of_child() -> dict[str, str]:
    """Variables for a Python process: it finds modules where this one does, never in its working folder, and
    starts no threads for linear algebra."""
    return {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONSAFEPATH": "1",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's would start its threads as it is imported
    }


@contextmanager
def environment_with(changes: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process and those that it starts have these variables too."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def server_is_ready() -> None:
    """For the server, after its imports: what these have put into the environment is not a launcher's."""
    global _environment_at_start
    _environment_at_start = dict(os.environ)


@dataclass(frozen=True)
class Surroundings:
    """Environment, usable cores, limits of resources and server of the process that starts another.

    A process that is forked from a server would have those of the server, as they were when it started.
    """

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cores: frozenset[int] = field(default_factory=_cores)
    limits: dict[int, tuple[int, int]] = field(default_factory=limits_of_process)
    server: str = field(default_factory=_server_address)

    def take_on(self) -> None:
        """Give them to this process. What a launcher has put into its environment since it began stays."""
        of_launcher = {
            name: value for name, value in os.environ.items() if _environment_at_start.get(name) != value
        }
        os.environ.clear()
        os.environ.update(self.environment | of_launcher)
        _share_server(self.server)
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        if self.limits:
            import resource

            for limit, values in self.limits.items():
                with suppress(ValueError, OSError):  # above the server's own
                    resource.setrlimit(limit, values)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A process started inside never sees Ctrl-C, which a terminal sends to all of its processes. This one
    gets it afterwards, and ends the other."""
    resource_tracker.ensure_running()  # or else the first start does it, and unblocks signals behind our back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """A process that multiprocessing starts inside does not import the main module of this one.

    A script may then ask for processes without a guard ``if __name__ == "__main__"``, and is not run again in
    each of them. What the processes need must be in other modules.
    """
    main = sys.modules["__main__"]
    # without a spec or a file, as in an interactive session, so that multiprocessing finds nothing to import
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def when_parent_is_gone(act: Callable[[], object] = lambda: os._exit(1)) -> threading.Thread:
    """Call ``act``, by default the end of this process, in a thread once the process that has started this
    one is gone, however that ended; returns the thread."""
    starter, parent = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        if starter is not None:  # one that was forked from a server has that for its parent
            starter.join()
        else:
            while os.getppid() == parent:
                time.sleep(1.0)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def write_stacks_on_signal(name: str) -> None:
    """From now on SIGUSR1 makes this process write the stacks of all its threads, and go on.

    They go to the file ``name`` in the folder :data:`STACKS_FOLDER`, if the environment has one. The handler
    is C code, so it answers while a thread waits inside a library.
    """
    if folder := os.environ.get(STACKS_FOLDER):
        # stays open for as long as the process lives
        descriptor = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        faulthandler.register(signal.SIGUSR1, descriptor, all_threads=True, chain=False)


def stacks_of(folder: Path, pids: Iterable[int | None]) -> str:
    """The stacks and last collectives that processes write into a folder on signals, each file under its
    name; then, if py-spy is installed, what it sees, which names the lines of Python below C code.

    Takes up to twice :data:`STACKS_S` seconds.
    """
    living = [pid for pid in pids if pid is not None]
    text = ""
    # one after the other: the stacks of a thread that runs are written while they change
    for times, number in enumerate((signal.SIGUSR1, signal.SIGUSR2), start=1):
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        text = written_stacks(folder, times * len(living))
    return text + "".join(_seen_by_py_spy(pid) for pid in living)


def written_stacks(folder: Path, files: int | None = None) -> str:
    """What signalled processes write into files of a folder, each under its name.

    Args:
        files: how many have something; None: all that there are. They are waited for, and until nothing more
            is written, for up to :data:`STACKS_S` seconds.
    """
    deadline, before, sizes = time.monotonic() + STACKS_S, [-1], [0]
    while time.monotonic() < deadline:
        written = sum(size > 0 for size in sizes)
        if sizes == before and written >= (len(sizes) if files is None else files):
            break
        time.sleep(STACKS_S / 20)
        before, sizes = sizes, [file.stat().st_size for file in _files(folder)]
    texts = {file.name: file.read_text(errors="replace", encoding="utf-8") for file in _files(folder)}
    return "".join(f"-- {name} --\n{text.rstrip()}\n" for name, text in texts.items() if text)


def _files(folder: Path) -> list[Path]:
    return sorted(filter(Path.is_file, folder.rglob("*")))


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
