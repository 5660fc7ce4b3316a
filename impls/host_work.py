"""Work in Python that a program's hooks cost the host, and that this suite does not run.

An observer of a step counts operators, nodes of autograd and calls of modules. A backend that plays another
program's hooks says here how long these take, in calls of a module, so that the host's rate is the cluster's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_note: ContextVar[Callable[[int, bool], None] | None] = ContextVar("what notes the host's work", default=None)


def host_works(calls: int, *, checks: bool = False) -> None:
    """The host works as long as for ``calls`` calls of modules, without the operators in them. If it
    ``checks`` its queue, it waits until its device has done what the host had launched three checks ago."""
    note = _note.get()
    if note is not None:
        note(calls, checks)


@contextmanager
def noting_host_work(note: Callable[[int, bool], None]) -> Iterator[None]:
    """A context that calls ``note`` with the calls and ``checks`` of each :func:`host_works`."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)
