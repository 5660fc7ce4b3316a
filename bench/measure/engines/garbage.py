"""Python's collector of reference cycles, left out for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cyclic_collection() -> Iterator[None]:
    """Leave reference cycles alone: what dies in a trace must die by the program, not when Python looks for
    garbage; and while a million events are timed, it would look at all that is made, and find none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
