"""What a step tells its observer: whose work is done, and what work in Python it costs the host.

*Whose work.* Under a causal mask, rank r of contiguous chunks attends to its own block of keys and to those
of the r ranks before it. Ranks do all other work alike. So one rank's step tells the work of all ranks, if it
marks its kernels for the blocks of lower ranks.

*The host's work.* An observer counts operators, nodes of autograd and calls of modules. A backend that plays
the hooks of another program, which this suite does not run, says here how long these take, in calls of a
module, so that the host's rate is the cluster's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")

#: the mark of work that all ranks do
EVERYONE = 0
#: the mark of work for the blocks of all lower ranks together, in proportion to their number
ALL_LOWER = -1

_whose: ContextVar[Callable[[int], None] | None] = ContextVar("what notes whose work it is", default=None)
_host: ContextVar[Callable[[int, bool], None] | None] = ContextVar("what notes the host's work", default=None)


@contextmanager
def set_to(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """A context in which a variable of this thread has the value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def work_of(whose: int) -> Iterator[None]:
    """A context whose work is for blocks of lower ranks.

    Args:
        whose: ALL_LOWER; or, if blocks follow one after another, the nearest rank's first, the number of such
            blocks on this rank.
    """
    note = _whose.get()
    if note is not None:
        note(whose)
    try:
        yield
    finally:
        if note is not None:
            note(EVERYONE)


def noting_work(note: Callable[[int], None]) -> AbstractContextManager[None]:
    """A context that calls ``note`` when work begins, with ``whose`` of :func:`work_of`, or with EVERYONE."""
    return set_to(_whose, note)


def host_works(calls: int, *, checks: bool = False) -> None:
    """The host works as long as for ``calls`` calls of modules, without the operators in them. If it
    ``checks`` its queue, it waits until its device has done what the host had launched three checks ago."""
    note = _host.get()
    if note is not None:
        note(calls, checks)


def noting_host_work(note: Callable[[int, bool], None]) -> AbstractContextManager[None]:
    """A context that calls ``note`` with the calls and ``checks`` of each :func:`host_works`."""
    return set_to(_host, note)
