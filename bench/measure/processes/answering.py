"""What the code declares, asked in a process that is forked from the server: a command that has cells run
needs the server anyway, and then imports no torch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from spbench.bench.declarations import NotAnswered, asked_elsewhere
from spbench.bench.errors import UserError
from spbench.bench.measure.processes.starting import (
    START_METHOD,
    Surroundings,
    interrupts_blocked,
    main_module_hidden,
    starting_context,
)


@contextmanager
def answers_of_server() -> Iterator[None]:
    """Inside, what a command does not know of the code is asked in one process that the first question
    starts; where none can be forked, or it fails, in this one."""
    process = _Answering()
    try:
        with asked_elsewhere(process.ask):
            yield
    finally:
        process.end()


class _Answering:
    """A process that answers, started when it is asked."""

    def __init__(self) -> None:
        self._connection: Connection | None = None

    def ask(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function of a module returns there.

        Raises:
            NotAnswered: there is no such process, or the function raises something.
        """
        try:
            self._connection = self._connection or _started()
            self._connection.send((function, args, kwargs))
            answers, answer = self._connection.recv()
        except (OSError, EOFError, UserError) as error:
            raise NotAnswered from error
        if not answers:
            raise NotAnswered
        return answer

    def end(self) -> None:
        """Have the process end."""
        if self._connection is not None:
            self._connection.close()


def _started() -> Connection:
    if START_METHOD != "forkserver":
        raise NotAnswered
    context = starting_context()
    ours, theirs = context.Pipe()
    with interrupts_blocked(), main_module_hidden():
        context.Process(target=_answer, args=(Surroundings(), theirs), daemon=True).start()  # type: ignore[attr-defined]
    theirs.close()
    return ours


def _answer(surroundings: Surroundings, connection: Connection) -> None:
    surroundings.take_on()
    with suppress(EOFError, OSError):  # nobody asks any more
        while True:
            function, args, kwargs = connection.recv()
            try:
                answer = True, function(*args, **kwargs)
            except BaseException:  # also what would end the process: asked again where it is told
                answer = False, None
            connection.send(answer)
