"""How child processes start, their environment and cores, and why they cannot start.

On Linux they are forked from a server (multiprocessing's start method forkserver), which has imported all
modules that a cell needs and does nothing else. A process with torch is then there in milliseconds instead of
seconds. The server has one thread, so that a fork is safe. Where system libraries do not bear a fork, as on
macOS, each process is spawned and imports everything itself.
"""

import errno
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import Any, Literal

from spbench.bench.errors import UserError

#: how processes are started, for multiprocessing and for torchrun's launcher
START_METHOD: Literal["forkserver", "spawn"] = "forkserver" if sys.platform == "linux" else "spawn"

#: files that a process opens for a process group, besides one for each rank: its store, Gloo's sockets
FILES_OF_GROUP = 4
#: files that the parent of a rank opens for it at least: pipes, and sockets to the server that forks it
FILES_OF_RANK = 4
#: the environment variable for whether ranks that make a group wait until all of its ranks have connected
MEET = "TORCH_DIST_INIT_BARRIER"

#: the modules that the server imports first and last
_PRELOADED, _SERVER = "spbench.bench.measure.processes.preloaded", "spbench.bench.measure.processes.server"

#: the module where multiprocessing looks up the function that starts a process, and that function
_multiprocessing: Any = util
_SPAWNED: Callable[..., int] = util.spawnv_passfds

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


@contextmanager
def beginning_server() -> Iterator[None]:
    """A context at whose end the server runs, forked from this process with the modules that were imported
    inside, so that torch is imported once; the server imports the rest while this process goes on. If this
    process then has several threads, one of which may hold a lock, the server is a new process."""
    with environment_with(environment_of_child()):  # because numpy reads variables when it is imported
        yield
    if START_METHOD == "forkserver" and not _server_is_shared:
        forked = len(os.listdir("/proc/self/task")) == 1
        with suppress(OSError):  # the start of a process raises the error again
            _run_server(_forked if forked else _SPAWNED)


def _run_server(start: Callable[..., int] = _SPAWNED) -> None:
    """Start the server if it does not run; ``start`` is the function by which multiprocessing starts it."""
    _make_folder_of_sockets()
    with interrupts_blocked(), environment_with(environment_of_child()):
        forkserver.set_forkserver_preload([_PRELOADED, _SERVER])
        _multiprocessing.spawnv_passfds = start
        try:
            forkserver.ensure_running()
        finally:
            _multiprocessing.spawnv_passfds = _SPAWNED


def _forked(_: bytes, arguments: list[str], files: Sequence[int]) -> int:
    """A replacement of :func:`multiprocessing.util.spawnv_passfds`: fork this process, and run in the child
    the program that ``python -c`` would run, with only these files open; returns the child's pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        _multiprocessing.spawnv_passfds = _SPAWNED
        sys.stdout = sys.__stdout__  # a command may have replaced it
        for number in {int(each) for each in os.listdir("/proc/self/fd")} - {0, 1, 2, *files}:
            with suppress(OSError):  # the listing's own file is closed already
                os.close(number)
        tracker: Any = resource_tracker._resource_tracker
        tracker._fd = tracker._pid = None
        server: Any = forkserver._forkserver
        server.__init__()
        exec(arguments[-1], {})
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def starting_context() -> BaseContext:
    """The multiprocessing context of :data:`START_METHOD`, with its server running and ready.

    The first call of a process waits seconds for the server's imports; an interrupt is safe meanwhile.
    Start processes inside of :func:`main_module_hidden`.

    Raises:
        UserError: the server cannot start, mostly for want of memory or of room for its socket.
    """
    allow_children()
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


def allow_children() -> None:
    """Let this process, which multiprocessing has made a daemon, start processes. Daemons end with their
    parent, as is wanted, but multiprocessing refuses them children, such as a worker's ranks."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def stop_server() -> None:
    """End the server of this process, if it runs; the next server imports the code as it is then."""
    if START_METHOD == "forkserver" and not _server_is_shared:
        server: Any = forkserver._forkserver
        server._stop()


def _do_nothing() -> None:
    """The work of a server's first process, whose end shows that the server's imports are done."""


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
    """Variables for a Python process, which finds modules where this process does, never in its working
    folder, and starts no threads for linear algebra."""
    return {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONSAFEPATH": "1",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's OpenBLAS would start threads at its import
    }


@contextmanager
def environment_with(changes: Mapping[str, str]) -> Iterator[None]:
    """A context in which this process, and processes that it starts, also have the variables ``changes``."""
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
    """Keep the environment after the server's imports, whose variables do not count as a launcher's."""
    global _environment_at_start
    _environment_at_start = dict(os.environ)


def limits_of_process() -> dict[int, tuple[int, int]]:
    """The soft and hard limits of this process's resources, by the numbers of :mod:`resource`; {} except on
    Linux."""
    if sys.platform != "linux":
        return {}
    every = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {limit: resource.getrlimit(limit) for limit in every}


@dataclass(frozen=True)
class Surroundings:
    """The environment, usable cores, limits and server of a process, for a process that it starts.

    A process that is forked from a server would otherwise have the server's, from the time of its start.
    """

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cores: frozenset[int] = field(default_factory=_cores)
    limits: dict[int, tuple[int, int]] = field(default_factory=limits_of_process)
    server: str = field(default_factory=_server_address)

    def take_on(self) -> None:
        """Set these surroundings for this process; variables that a launcher has set since the start stay."""
        of_launcher = {
            name: value for name, value in os.environ.items() if _environment_at_start.get(name) != value
        }
        os.environ.clear()
        os.environ.update(self.environment | of_launcher)
        _share_server(self.server)
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        if self.limits:
            for limit, values in self.limits.items():
                with suppress(ValueError, OSError):  # above the server's own
                    resource.setrlimit(limit, values)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A context in which a new process never sees Ctrl-C, which a terminal sends to all of its processes.
    This process gets the signal afterwards, and ends the other."""
    resource_tracker.ensure_running()  # or else the first start does it, and unblocks signals behind our back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """A context in which a process that multiprocessing starts does not import this process's main module.

    So a script needs no guard ``if __name__ == "__main__"``, and is not run again in each process. The code
    of the processes must be in other modules.
    """
    main = sys.modules["__main__"]
    # without a spec or a file, as in an interactive session, so that multiprocessing finds nothing to import
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def check_open_files(further: int, purpose: str) -> None:
    """Refuse to open more files than this process may: Gloo would wait for minutes and not say why.

    Args:
        further: the number of files to open in addition to the open ones.
        purpose: as the end of a sentence, "to start 4 ranks".

    Raises:
        UserError: the limit is too low; the text names it.
    """
    if not (limits := limits_of_process()):
        return
    allowed = limits[resource.RLIMIT_NOFILE][0]
    needed = len(os.listdir("/proc/self/fd")) + further
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise UserError(
            f"this process may open {allowed} files, and needs at least {needed} {purpose}; raise the limit: "
            f"ulimit -n {max(1024, 2 * needed)}"
        )


def no_process(error: BaseException, server: int | None) -> str:
    """Why the server could not fork a process for this one, and what to do.

    Args:
        error: the exception of the attempt.
        server: the pid of the server, if it is a child of this process; else None.
    """
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    gone = isinstance(error, EOFError | ConnectionError | FileNotFoundError)
    if gone and server is None:
        return f"the process that forks ranks and workers is gone ({what}); run the same command again"
    if gone and (code := _exit_code(server)) is not None:
        return (
            f"the process that forks ranks and workers {fate(code)}; run the same command again, and if that "
            "fails too, look at the limit of memory (ulimit -v, a container's)"
        )
    files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    where = (
        "the limit of open files (ulimit -n)" if files else "the limits of memory and processes (ulimit -a)"
    )
    return f"cannot start processes ({what}); look at {where} and at TMPDIR"


def _exit_code(pid: int | None) -> int | None:
    """The exit code of a child of this process, negative for a signal; None: it has not ended within a
    second. The child stays for its parent to wait for."""
    for _ in range(20) if pid is not None else ():
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # type: ignore[arg-type]
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(0.05)
    return None


def fate(exitcode: int | None) -> str:
    """How a process with this exit code ended, as the rest of a sentence."""
    if exitcode is None or exitcode >= 0:
        return f"ended by itself with exit code {exitcode}"
    guess = " (was the machine out of memory?)" if exitcode == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exitcode).name}{guess}"
