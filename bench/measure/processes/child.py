"""A child process that this process starts, talks with over a pipe, and ends: a worker, a rank, an agent."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from spbench.bench.measure.processes import starting

#: seconds that a process has to end after the end of its pipe
GRACE_S = 5.0


class ChildGone(Exception):
    """The process has ended; the text says how it ended, as the rest of a sentence."""


class Child:
    """A process that runs a function of a module, with this process's surroundings.

    Ctrl-C, which a terminal sends to all of its processes, never reaches the child. The child ends with this
    process if ``main`` calls :func:`when_parent_is_gone`. Both sides send plain pickles, because
    multiprocessing's would pass tensors on as shared memory.

    Args:
        main: called in the child with its end of the pipe and ``args``; returns when the pipe ends.
        environment: variables of the process; None: those of this process.
        leads_group: whether the child leads a process group, to which all signals then go.

    Raises:
        UserError: no process can start.
    """

    def __init__(
        self,
        main: Callable[..., None],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        leads_group: bool = False,
    ):
        context = starting.starting_context()
        self.connection, theirs = context.Pipe()
        surroundings = starting.Surroundings({**(os.environ if environment is None else environment)})
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_begin, args=(surroundings, leads_group, theirs, main, args), daemon=True
        )
        with starting.interrupts_blocked(), starting.main_module_hidden():
            self.process.start()
        theirs.close()  # so that the death of the process reads as the end of the pipe
        self.leads_group = leads_group

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def work_so_far(self) -> str:
        """The times that the main thread of the process has worked for, while it waits for other threads, as
        in a collective; "" while it works, while it waits for the clock or for a file, such as the pipe of a
        DataLoader's workers, or where the system does not say."""
        pid = self.process.pid
        with suppress(OSError):
            told = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="utf-8")
            state, *rest = told.rpartition(")")[2].split()
            of_kernel = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8")
            ends = any(word in of_kernel for word in ("nanosleep", "poll", "select", "pipe"))
            return " ".join(rest[10:12]) if state == "S" and not ends else ""
        return ""

    def send(self, content: Any) -> None:
        """Send an object that can be pickled. A dead process raises nothing here, but in :meth:`receive`."""
        message = pickle.dumps(content)
        with suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> Any:
        """Wait for the next object that the process sends, and return it.

        Raises:
            ChildGone: the process has ended.
        """
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.process.join(GRACE_S)
            raise ChildGone(starting.fate(self.process.exitcode)) from error

    def signal(self, number: int) -> None:
        """Send a signal to the process, or to its group, which may outlive the process."""
        assert self.process.pid is not None
        if self.leads_group:
            with suppress(ProcessLookupError):  # it has no group yet, or the whole group is gone
                os.killpg(self.process.pid, number)
                return
        with suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Ask the process to end. Call :meth:`end` next."""
        self.connection.close()
        self.signal(signal.SIGTERM)

    def end(self, grace_s: float = 0.0) -> None:
        """Wait ``grace_s`` seconds for the process to end, then kill it and its group."""
        self.connection.close()
        if grace_s:
            self.process.join(grace_s)
        self.signal(signal.SIGKILL)
        self.process.join()
        self.process.close()


def requests(connection: Connection) -> Iterator[Any]:
    """In the child: yields the objects that the parent sends, in order, until the parent closes the pipe."""
    with suppress(EOFError, OSError):
        while True:
            yield pickle.loads(connection.recv_bytes())


def _begin(
    surroundings: starting.Surroundings,
    leads_group: bool,
    connection: Connection,
    main: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # before other threads start and inherit the mask: only a thread that waits for the signal may get it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    surroundings.take_on()
    if leads_group:
        os.setpgid(0, 0)
    starting.allow_children()
    main(connection, *args)


def when_parent_is_gone(act: Callable[[], object] = lambda: os._exit(1)) -> threading.Thread:
    """Call ``act``, by default the end of this process, in a thread once the process that started this one is
    gone, however that process ended; returns the thread."""
    starter, parent = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        if starter is not None:  # the server is the parent of a process that was forked from it
            starter.join()
        else:
            while os.getppid() == parent:
                time.sleep(1.0)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
