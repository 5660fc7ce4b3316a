"""Work that some ranks have and others have not, marked as it is done.

Under a causal mask, rank r of contiguous chunks attends to its own block of keys and to those of the r ranks
before it. All else that ranks do is alike. So one rank's step stands for all, if it says which of its
kernels are for the blocks of lower ranks: an observer can tell from these what each other rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: what all ranks do
EVERYONE = 0
#: what is done at once for the blocks of all lower ranks: as much of it as there are such blocks
ALL_LOWER = -1

_note: ContextVar[Callable[[int], None] | None] = ContextVar("what notes whose work it is", default=None)


@contextmanager
def work_of(whose: int) -> Iterator[None]:
    """What is computed inside is for blocks of lower ranks.

    Args:
        whose: ALL_LOWER; or, where blocks are worked on one after another, the nearest rank's first, how many
            of these there are on this rank.
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
    """Inside, ``note`` is called with whose work it is that begins: see :func:`work_of`, or EVERYONE."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)
