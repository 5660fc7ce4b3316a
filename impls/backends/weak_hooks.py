"""Hooks that do not keep alive what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """A hook that calls a bound method with its arguments while the method's object lives.

    Python's garbage collector does not see what a tensor's hook holds, such as process groups. A module whose
    hook held it would form a cycle that is never collected.
    """
    reference = WeakMethod(method)

    def hook(*arguments: Any) -> None:
        if (bound := reference()) is not None:
            bound(*arguments)

    return hook
