"""A process that this one starts, talks with over a pipe, and ends: a worker of a sweep, a rank, an agent."""

from __future__ import annotations

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
from typing import Any

from spbench.bench.measure.processes.starting import (
    Surroundings,
    allow_children,
    fate,
    interrupts_blocked,
    main_module_hidden,
    starting_context,
)

#: seconds that a process whose pipe has ended has to end too
GRACE_S = 5.0


class ChildGone(Exception):
    """The process has ended; the text says how, as the rest of a sentence."""


class Child:
    """A process that runs a function of a module, with this process's surroundings.

    Ctrl-C, which a terminal sends to all of its processes, never reaches it. It ends with this process if
    ``main`` calls :func:`when_parent_is_gone`. Both sides send plain pickles: multiprocessing's would pass
    tensors on as shared memory.

    Args:
        main: called in the process with its end of the pipe and ``args``; it ends when the pipe does
            (:func:`requests`).
        environment: variables of the process; None: those of this process.
        leads_group: whether it leads a process group, which all signals then go to.

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
        context = starting_context()
        self.connection, theirs = context.Pipe()
        surroundings = Surroundings() if environment is None else Surroundings({**environment})
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_begin, args=(surroundings, leads_group, theirs, main, args), daemon=True
        )
        with interrupts_blocked(), main_module_hidden():
            self.process.start()
        theirs.close()  # so that the death of the process reads as the end of the pipe
        self.leads_group = leads_group

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def send(self, content: Any) -> None:
        """Send what can be pickled. Nothing is raised if the process is dead: :meth:`receive` finds out."""
        message = pickle.dumps(content)
        with suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> Any:
        """Wait for what the process sends.

        Raises:
            ChildGone: it has ended.
        """
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.process.join(GRACE_S)
            raise ChildGone(fate(self.process.exitcode)) from error

    def signal(self, number: int) -> None:
        """Send a signal to the process, or to its group, in which there may be others when it is dead."""
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
        """Wait so many seconds for its end, then kill it and its group."""
        self.connection.close()
        if grace_s:
            self.process.join(grace_s)
        self.signal(signal.SIGKILL)
        self.process.join()
        self.process.close()


def requests(connection: Connection) -> Iterator[Any]:
    """In the process: what is sent to it, one after another, until the other end is closed."""
    with suppress(EOFError, OSError):
        while True:
            yield pickle.loads(connection.recv_bytes())


def _begin(
    surroundings: Surroundings,
    leads_group: bool,
    connection: Connection,
    main: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # before there are other threads, which inherit it: only one that waits for the signal may get it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    surroundings.take_on()
    if leads_group:
        os.setpgid(0, 0)
    allow_children()
    main(connection, *args)


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
