"""Marks of work that some ranks have and others do not, set while the work is done.

Under a causal mask, rank r of contiguous chunks attends to its own block of keys and to those of the r ranks
before it. Ranks do all other work alike. So one rank's step tells the work of all ranks, if it marks its
kernels for the blocks of lower ranks: an observer can derive from the marks what each other rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: the mark of work that all ranks do
EVERYONE = 0
#: the mark of work for the blocks of all lower ranks together, in proportion to their number
ALL_LOWER = -1

_note: ContextVar[Callable[[int], None] | None] = ContextVar("what notes whose work it is", default=None)


@contextmanager
def work_of(whose: int) -> Iterator[None]:
    """A context whose work is for blocks of lower ranks.

    Args:
        whose: ALL_LOWER; or, if blocks follow one after another, the nearest rank's first, the number of such
            blocks on this rank.
    """
    note = _note.get()
    if note is not None:
        note(whose)
    try:
        yield
    finally:
        if note is not None:
            note(EVERYONE)


@contextmanager
def noting_work(note: Callable[[int], None]) -> Iterator[None]:
    """A context that calls ``note`` when work begins, with ``whose`` of :func:`work_of`, or with EVERYONE."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)
