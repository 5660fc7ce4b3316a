"""Hooks that do not keep alive what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """A hook that calls a bound method with its arguments while the method's object lives.

    Python does not see as garbage what a hook of a tensor holds, process groups among it; and a module whose
    hook held it would be a circle.
    """
    reference = WeakMethod(method)

    def hook(*arguments: Any) -> None:
        if (bound := reference()) is not None:
            bound(*arguments)

    return hook
